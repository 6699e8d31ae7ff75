/* The FCDP_SIM_* environment: read once, at cuInit or at the first use of the control interface. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "sim/gpu/internal.h"

static bool complain(const char *name, const char *text, const char *expected) {
    fprintf(stderr, "fcdp_simgpu: %s=%s: expected %s\n", name, text, expected);
    return false;
}

static bool parse_capacity(const char *text) {
    size_t bytes;
    if (!fcdp__size_parse(text, &bytes) || bytes > INT64_MAX || bytes < SIM_PAGE_BYTES)
        return complain("FCDP_SIM_CAPACITY", text, "at least 2M of " FCDP_SIZE_EXPECTED);
    sim.capacity_bytes = bytes;
    return true;
}

static bool parse_pcie(const char *text) {
    char *end;
    double gigabytes_per_s = strtod(text, &end);
    if (end == text || *end || !isfinite(gigabytes_per_s) || gigabytes_per_s < 0)
        return complain("FCDP_SIM_PCIE", text, "GB/s as a decimal number, 0 for unlimited");
    sim.link_bytes_per_ns = gigabytes_per_s;
    return true;
}

static bool parse_number(const char *text, unsigned long least, unsigned long most, unsigned long *value_out,
                         const char **end_out) {
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || errno || value < least || value > most) return false;
    *value_out = value;
    *end_out = end;
    return true;
}

static bool parse_fail(const char *text) {
    static const char expected[] = "NAME:N[:CODE], such as cuMemCreate:3:2 or any:10";
    const char *colon = strchr(text, ':');
    char name[64];
    if (!colon || colon == text || (size_t)(colon - text) >= sizeof name)
        return complain("FCDP_SIM_FAIL", text, expected);
    memcpy(name, text, (size_t)(colon - text));
    name[colon - text] = '\0';
    unsigned long n, code = CUDA_ERROR_UNKNOWN;
    const char *rest;
    bool ok = parse_number(colon + 1, 1, 1000000000, &n, &rest);
    if (ok && *rest == ':') ok = parse_number(rest + 1, 1, 999, &code, &rest);
    int entry = simgpu__fault_find(name);
    if (!ok || *rest || entry < 0) return complain("FCDP_SIM_FAIL", text, expected);
    simgpu__fault_arm(entry, n, (int)code);
    return true;
}

static bool parse_flag(const char *name, const char *text, bool *on_out) {
    *on_out = strcmp(text, "1") == 0;
    return *on_out || strcmp(text, "0") == 0 || complain(name, text, "0 or 1");
}

static bool parse_poison(const char *text) {
    return parse_flag("FCDP_SIM_POISON", text, &sim.poison);
}

static bool parse_serial(const char *text) {
    return parse_flag("FCDP_SIM_SERIAL", text, &sim.serial);
}

static void races_set(int how) {
    sim.races = how & (SIMGPU_RACES | SIMGPU_RACES_STRICT);
    sim.strict = how & SIMGPU_RACES_STRICT;
    sim.goes_on = how & SIMGPU_RACES_GO_ON;
}

static bool parse_races(const char *text) {
    bool on, valid = parse_flag("FCDP_SIM_RACES", text, &on);
    races_set(on);
    return valid;
}

static bool parse_queues(const char *text) {
    unsigned long n;
    const char *rest;
    if (!parse_number(text, 1, SIM_MAX_QUEUES, &n, &rest) || *rest)
        return complain("CUDA_DEVICE_MAX_CONNECTIONS", text, "1 to 32 hardware queues");
    sim.n_queues = (unsigned)n;
    return true;
}

/* A timeline that is on stays so: a reset between tests must not begin the file anew. */
static bool begin_timeline(const char *pattern) {
    if (simgpu__timeline_is_on() || simgpu__timeline_open(pattern) == 0) return true;
    return complain("FCDP_SIM_TIMELINE", pattern, "the path of a file that can be written");
}

static bool apply(const char *name, bool (*parse)(const char *text)) {
    const char *text = getenv(name);
    return !text || !*text || parse(text);
}

bool simgpu__settings_load(void) {
    sim_lock();
    if (!sim.settings_loaded) {
        sim.settings_loaded = true;
        sim.capacity_bytes = (size_t)16 << 30;
        sim.link_bytes_per_ns = sim.memory_bytes_per_ns = sim.core_times = 0;
        sim.poison = false;
        races_set(0);
        sim.n_queues = 0;
        sim.serial = false;
        sim.settings_valid = apply("FCDP_SIM_CAPACITY", parse_capacity) &&
                             apply("FCDP_SIM_PCIE", parse_pcie) && apply("FCDP_SIM_FAIL", parse_fail) &&
                             apply("FCDP_SIM_POISON", parse_poison) && apply("FCDP_SIM_RACES", parse_races) &&
                             apply("FCDP_SIM_SERIAL", parse_serial) &&
                             apply("CUDA_DEVICE_MAX_CONNECTIONS", parse_queues) &&
                             apply("FCDP_SIM_TIMELINE", begin_timeline);
    }
    bool valid = sim.settings_valid;
    sim_unlock();
    return valid;
}

void simgpu_set_capacity(size_t bytes) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.capacity_bytes = bytes;
    sim_unlock();
}

void simgpu_set_races(int how) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    races_set(how);
    sim_unlock();
}

void simgpu_set_queues(unsigned n) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.n_queues = n < SIM_MAX_QUEUES ? n : SIM_MAX_QUEUES;
    simgpu__streams_wake();
    sim_unlock();
}

void simgpu_set_serial(int on) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.serial = on;
    simgpu__streams_wake();
    sim_unlock();
}

void simgpu_set_pcie(double gigabytes_per_s) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.link_bytes_per_ns = gigabytes_per_s > 0 ? gigabytes_per_s : 0;
    sim_unlock();
}

void simgpu_set_memory(double gigabytes_per_s) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.memory_bytes_per_ns = gigabytes_per_s > 0 ? gigabytes_per_s : 0;
    sim_unlock();
}

void simgpu_set_core(double times) {
    if (simgpu__forked()) return;
    simgpu__settings_load();
    sim_lock();
    sim.core_times = times > 0 ? times : 0;
    sim_unlock();
}
