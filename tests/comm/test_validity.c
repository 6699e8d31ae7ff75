/* Every signal alone makes a copy stale; so do the silent writes that no version counter shows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "comm/validity.h"
#include "tests/comm/host_fingerprint.h"

typedef struct fixture {
    fcdp_validity *validity;
    fcdp_signals signals;
    fcdp_process_signals process;
    uint8_t shard[1000];
    bool readable; /* the shard's bytes can be fingerprinted */
} fixture;

static uint64_t fingerprint(const fixture *f) {
    return host_fingerprint(f->shard, sizeof f->shard);
}

static uint32_t observe(fixture *f) {
    uint64_t now = fingerprint(f);
    return fcdp__validity_observe(f->validity, 0, &f->signals, &f->process, f->readable ? &now : NULL);
}

static void gather(fixture *f) {
    fcdp_observation seen = fcdp__validity_observed(f->validity, 0);
    fcdp__validity_accept(f->validity, 0, &seen);
}

/* A parameter that has been gathered and is fresh. */
static fixture fixture_fresh(bool readable) {
    fixture f = {.signals = {1, 2, 3, 4, 5, 6, 7, 1}, .process = {true, true, 4}, .readable = readable};
    for (size_t i = 0; i < sizeof f.shard; i++) f.shard[i] = (uint8_t)(i * 7);
    assert_int_equal(fcdp__validity_create(1, &f.validity), FCDP_OK);
    assert_int_equal(observe(&f), FCDP_STALE_NEW);
    gather(&f);
    assert_int_equal(observe(&f), 0);
    return f;
}

static void test_each_signal_alone(void **state) {
    (void)state;
    static const struct {
        size_t offset;
        uint32_t mask;
    } rows[] = {
        {offsetof(fcdp_signals, object_id), FCDP_STALE_IDENTITY},
        {offsetof(fcdp_signals, storage), FCDP_STALE_IDENTITY},
        {offsetof(fcdp_signals, dtypes), FCDP_STALE_IDENTITY},
        {offsetof(fcdp_signals, requires_grad), FCDP_STALE_IDENTITY},
        {offsetof(fcdp_signals, version_outer), FCDP_STALE_VERSION},
        {offsetof(fcdp_signals, version_local), FCDP_STALE_VERSION},
        {offsetof(fcdp_signals, version_data), FCDP_STALE_VERSION},
        {offsetof(fcdp_signals, optimizer_steps), FCDP_STALE_OPTIMIZER},
    };
    for (int readable = 0; readable < 2; readable++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            fixture f = fixture_fresh(readable);
            uint64_t *signal = (uint64_t *)((char *)&f.signals + rows[i].offset);
            *signal += 1;
            assert_true(fcdp__validity_moved(f.validity, 0, &f.signals, NULL));
            assert_int_equal(observe(&f), rows[i].mask);
            assert_false(fcdp__validity_moved(f.validity, 0, &f.signals, NULL));
            assert_int_equal(observe(&f), rows[i].mask); /* until it is gathered, in every observation */
            gather(&f);
            assert_int_equal(observe(&f), 0);
            fcdp__validity_destroy(f.validity);
        }
}

/* AdamW(foreach=True) and fused=True over DTensors move no counter; only the step hook tells. */
static void test_silent_optimizer_over_dtensors(void **state) {
    (void)state;
    fixture f = fixture_fresh(false);
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    fcdp__validity_destroy(f.validity);
}

/* An EMA swap through .data around an evaluation: no counter, no step, and the swap back must show too. */
static void test_silent_swap_around_an_evaluation(void **state) {
    (void)state;
    fixture f = fixture_fresh(false);
    f.process.grad_mode = false; /* swapped in */
    assert_int_equal(observe(&f), FCDP_STALE_GRAD_MODE);
    gather(&f);
    assert_int_equal(observe(&f), 0);
    f.process.grad_mode = true; /* swapped out */
    assert_int_equal(observe(&f), FCDP_STALE_GRAD_MODE);
    fcdp__validity_destroy(f.validity);
}

/* The evaluation observed the parameter but did not use it; after it the mode is the accepted one again. */
static void test_swap_that_was_never_gathered(void **state) {
    (void)state;
    fixture f = fixture_fresh(false);
    f.process.grad_mode = false;
    assert_int_equal(observe(&f), FCDP_STALE_GRAD_MODE);
    f.process.grad_mode = true;
    assert_int_equal(observe(&f), FCDP_STALE_GRAD_MODE);
    fcdp__validity_destroy(f.validity);
}

/* Hand-written updates: no optimizer hook ever fires, so every backward that reduced gradients counts. */
static void test_silent_hand_written_update(void **state) {
    (void)state;
    fixture f = fixture_fresh(false);
    f.process.reductions++;
    assert_int_equal(observe(&f), 0); /* an optimizer has been seen: accumulation */
    f.process.optimizer_seen = false;
    assert_int_equal(observe(&f), FCDP_STALE_REDUCED);
    fcdp__validity_destroy(f.validity);
}

static void test_fingerprint_decides_where_there_is_one(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.process = (fcdp_process_signals){false, false, 9};
    assert_int_equal(observe(&f), 0); /* an evaluation over unchanged bytes costs nothing */
    f.shard[999] ^= 1;
    uint64_t now = fingerprint(&f);
    assert_true(fcdp__validity_moved(f.validity, 0, &f.signals, &now));
    assert_false(fcdp__validity_moved(f.validity, 0, &f.signals, NULL));
    assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
    f.shard[999] ^= 1;
    assert_int_equal(observe(&f), 0);
    fcdp__validity_destroy(f.validity);
}

static void confirm_and_gather(fixture *f) {
    fcdp__validity_confirm(f->validity, 0, &f->signals, NULL);
    gather(f);
}

/* A trip through another device, requires_grad, a counter that moves without a
 * write, an optimizer that changed nothing. */
static void test_equal_bytes_are_enough_for_a_confirmed_copy(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof(fcdp_signals) / sizeof(uint64_t); k++) {
        fixture f = fixture_fresh(true);
        f.shard[0] ^= 1;
        assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
        confirm_and_gather(&f);
        ((uint64_t *)&f.signals)[k]++;
        bool cast = k == offsetof(fcdp_signals, dtypes) / sizeof(uint64_t);
        assert_int_equal(observe(&f), cast ? FCDP_STALE_IDENTITY : 0); /* the copy is of another dtype */
        f.readable = false;
        assert_true(observe(&f) != 0); /* without a fingerprint it is as ever */
        fcdp__validity_destroy(f.validity);
    }
}

/* Written after the ranks agreed and before the gather, and then put back: the copy is of neither. */
static void test_a_write_before_the_gather_is_not_confirmed(void **state) {
    (void)state;
    for (int says = 0; says < 2; says++) {
        fixture f = fixture_fresh(true);
        f.shard[0] ^= 1;
        assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
        f.shard[0] ^= 2; /* what the gather reads */
        f.signals.version_data++;
        if (says) fcdp__validity_confirm(f.validity, 0, &f.signals, NULL);
        gather(&f);
        f.shard[0] ^= 2;
        f.signals.version_data++;
        assert_int_equal(observe(&f), FCDP_STALE_VERSION);
        fcdp__validity_destroy(f.validity);
    }
}

/* As above, by a write that moves no signal, and read again where the gather reads it: the copy is of what is
 * read then. */
static void test_a_silent_write_before_the_gather_is_known_by_its_bytes(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.shard[0] ^= 1;
    assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
    f.shard[0] ^= 2;
    uint64_t read = fingerprint(&f);
    fcdp__validity_confirm(f.validity, 0, &f.signals, &read);
    gather(&f);
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), 0); /* as it was gathered */
    f.shard[0] ^= 2;
    f.signals.optimizer_steps--;
    assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
    fcdp__validity_destroy(f.validity);
}

/* The device's fingerprint comes later, to the copy that was gathered then and to no other. */
static void test_a_fingerprint_that_comes_later_is_of_its_gather(void **state) {
    (void)state;
    for (int replaced = 0; replaced < 2; replaced++) {
        fixture f = fixture_fresh(true);
        f.shard[0] ^= 1;
        assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
        f.shard[0] ^= 2;
        uint64_t read = fingerprint(&f);
        fcdp__validity_await(f.validity, 0, &f.signals, 7);
        if (!replaced) gather(&f);
        fcdp__validity_amend(f.validity, 0, 7, read);
        f.shard[0] ^= 2;
        assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT); /* or still what was there before the gather */
        f.shard[0] ^= 2;
        f.signals.optimizer_steps++;
        assert_int_equal(observe(&f), replaced ? FCDP_STALE_FINGERPRINT | FCDP_STALE_OPTIMIZER : 0);
        fcdp__validity_destroy(f.validity);
    }
}

/* Confirmed is one gather's copy, not the parameter's for ever. */
static void test_each_observation_is_confirmed_anew(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    confirm_and_gather(&f);
    f.shard[0] ^= 1;
    assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
    gather(&f); /* by a reader that does not say what it read */
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    f.readable = false;
    (void)observe(&f);
    fcdp__validity_confirm(f.validity, 0, &f.signals, NULL);
    gather(&f); /* nothing was fingerprinted that could be confirmed */
    f.readable = true;
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    fcdp__validity_destroy(f.validity);
}

static void test_no_fingerprint_now_falls_back(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.readable = false;
    assert_int_equal(observe(&f), 0);
    f.process.grad_mode = false;
    assert_int_equal(observe(&f), FCDP_STALE_GRAD_MODE);
    fcdp__validity_destroy(f.validity);
}

/* The shard is written and observed while its gather runs: the copy that arrives is the old one's. */
/* Freed, and filled again: at the same address, with the same counters. Bytes alone tell what they are. */
static void test_what_was_missing_is_known_by_its_bytes_alone(void **state) {
    (void)state;
    for (int readable = 0; readable < 2; readable++)
        for (int confirmed = 0; confirmed < 2; confirmed++) {
            fixture f = fixture_fresh(readable);
            f.shard[0] ^= 1;
            f.signals.version_data++;
            (void)observe(&f);
            if (confirmed)
                confirm_and_gather(&f);
            else
                gather(&f);
            uint64_t bytes = fingerprint(&f);
            assert_int_equal(fcdp__validity_miss(f.validity, 0), FCDP_STALE_MISSING);
            assert_true(fcdp__validity_moved(f.validity, 0, &f.signals, &bytes));
            bool fresh = readable && confirmed;
            assert_int_equal(fcdp__validity_is_fresh(f.validity, 0, &f.signals, bytes), fresh);
            assert_int_equal(observe(&f), fresh ? 0 : FCDP_STALE_IDENTITY);
            gather(&f);
            assert_int_equal(observe(&f), 0);
            assert_int_equal(fcdp__validity_miss(f.validity, 0), FCDP_STALE_MISSING);
            gather(&f); /* of what was not there */
            assert_int_equal(observe(&f), FCDP_STALE_NEW);
            fcdp__validity_destroy(f.validity);
        }
}

static void test_accept_is_of_the_submission(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    fcdp_observation submitted = fcdp__validity_observed(f.validity, 0);
    f.signals.optimizer_steps++;
    f.shard[0] ^= 1;
    assert_true(observe(&f) != 0);
    fcdp__validity_accept(f.validity, 0, &submitted);
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER | FCDP_STALE_FINGERPRINT);
    fcdp__validity_destroy(f.validity);
}

static void test_invalidate(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    fcdp__validity_invalidate(f.validity);
    assert_int_equal(observe(&f), FCDP_STALE_NEW);
    gather(&f);
    assert_int_equal(observe(&f), 0);
    fcdp__validity_destroy(f.validity);
}

static void test_never_observed(void **state) {
    (void)state;
    fixture f = {.readable = false};
    assert_int_equal(fcdp__validity_create(1, &f.validity), FCDP_OK);
    assert_true(fcdp__validity_moved(f.validity, 0, &f.signals, NULL));
    gather(&f); /* of an observation that never was */
    assert_int_equal(observe(&f), FCDP_STALE_NEW);
    fcdp__validity_destroy(f.validity);
}

/* A step of an optimizer foretells a change once one has been seen to make one, by the observation or by
 * what the gather read; and no longer when one made none. */
static void test_a_step_foretells_what_the_last_one_did(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    uint64_t next = f.signals.optimizer_steps + 1;
    assert_false(fcdp__validity_is_foretold(f.validity, 0, next));
    for (int step = 0; step < 6; step++, next++) {
        bool writes = step < 2 || step > 3, foretold = step == 1 || step == 2 || step == 5;
        f.signals.optimizer_steps = next;
        f.shard[0] ^= writes;
        assert_int_equal(fcdp__validity_is_foretold(f.validity, 0, next), foretold);
        f.readable = !foretold;
        uint32_t stale = observe(&f);
        assert_int_equal(stale != 0, writes || foretold);
        if (stale) {
            fcdp__validity_await(f.validity, 0, &f.signals, next);
            gather(&f);
            fcdp__validity_amend(f.validity, 0, next, fingerprint(&f));
        }
        f.readable = true;
        assert_int_equal(observe(&f), 0);
        assert_false(fcdp__validity_is_foretold(f.validity, 0, f.signals.optimizer_steps) && stale);
    }
    fcdp__validity_invalidate(f.validity);
    assert_false(fcdp__validity_is_foretold(f.validity, 0, next));
    fcdp__validity_destroy(f.validity);
}

/* The bytes were not read before the gather, and what it read is not known yet: the copy equals no bytes. */
static void test_a_copy_of_which_the_fingerprint_is_to_come_is_not_fresh(void **state) {
    (void)state;
    fixture f = fixture_fresh(true);
    f.readable = false;
    f.signals.optimizer_steps++;
    assert_int_equal(observe(&f), FCDP_STALE_OPTIMIZER);
    fcdp__validity_await(f.validity, 0, &f.signals, 7);
    gather(&f);
    f.readable = true;
    assert_int_equal(observe(&f), FCDP_STALE_FINGERPRINT);
    fcdp__validity_amend(f.validity, 0, 7, fingerprint(&f));
    assert_int_equal(observe(&f), 0);
    fcdp__validity_destroy(f.validity);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_signal_alone),
        cmocka_unit_test(test_silent_optimizer_over_dtensors),
        cmocka_unit_test(test_silent_swap_around_an_evaluation),
        cmocka_unit_test(test_swap_that_was_never_gathered),
        cmocka_unit_test(test_silent_hand_written_update),
        cmocka_unit_test(test_fingerprint_decides_where_there_is_one),
        cmocka_unit_test(test_equal_bytes_are_enough_for_a_confirmed_copy),
        cmocka_unit_test(test_a_write_before_the_gather_is_not_confirmed),
        cmocka_unit_test(test_a_silent_write_before_the_gather_is_known_by_its_bytes),
        cmocka_unit_test(test_a_fingerprint_that_comes_later_is_of_its_gather),
        cmocka_unit_test(test_each_observation_is_confirmed_anew),
        cmocka_unit_test(test_no_fingerprint_now_falls_back),
        cmocka_unit_test(test_what_was_missing_is_known_by_its_bytes_alone),
        cmocka_unit_test(test_a_step_foretells_what_the_last_one_did),
        cmocka_unit_test(test_a_copy_of_which_the_fingerprint_is_to_come_is_not_fresh),
        cmocka_unit_test(test_accept_is_of_the_submission),
        cmocka_unit_test(test_invalidate),
        cmocka_unit_test(test_never_observed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
