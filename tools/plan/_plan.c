/* _plan.c - the extension module of fcdp-plan: dicts of numbers in, dicts of numbers out.
 *
 * A struct's fields and a dict's keys have the same names: the tables below. A key that is missing, or
 * that no table has, is an error.
 */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "tools/plan/choices.h"
#include "tools/plan/memory.h"
#include "tools/plan/shape.h"
#include "tools/plan/simulate.h"
#include "tools/plan/split.h"

/* double, uint32_t, bool; MEASURED: a double that may be left out, and is 0 then. */
typedef enum kind { NUMBER, WHOLE, FLAG, MEASURED } kind;

typedef struct field {
    const char *name;
    size_t at;
    kind kind;
} field;

#define FIELD(type, name, kind) {#name, offsetof(type, name), kind}
#define END {NULL, 0, NUMBER}

static const field cluster_fields[] = {FIELD(plan_cluster, n_nodes, NUMBER),
                                       FIELD(plan_cluster, gpus_per_node, NUMBER),
                                       FIELD(plan_cluster, gpu_memory_bytes, NUMBER),
                                       FIELD(plan_cluster, host_memory_bytes, NUMBER),
                                       FIELD(plan_cluster, flops, NUMBER),
                                       FIELD(plan_cluster, memory_rate, NUMBER),
                                       FIELD(plan_cluster, pcie_rate, NUMBER),
                                       FIELD(plan_cluster, host_rate, NUMBER),
                                       FIELD(plan_cluster, node_rate, NUMBER),
                                       FIELD(plan_cluster, inter_rate, NUMBER),
                                       FIELD(plan_cluster, burst_bytes, MEASURED),
                                       FIELD(plan_cluster, gather_times, MEASURED),
                                       FIELD(plan_cluster, reduce_times, MEASURED),
                                       FIELD(plan_cluster, lane_gather_times, MEASURED),
                                       FIELD(plan_cluster, lane_reduce_times, MEASURED),
                                       FIELD(plan_cluster, message_bytes, MEASURED),
                                       FIELD(plan_cluster, packet_bytes, MEASURED),
                                       FIELD(plan_cluster, packet_payload, MEASURED),
                                       FIELD(plan_cluster, file_rate, NUMBER),
                                       FIELD(plan_cluster, cpu_rate, NUMBER),
                                       FIELD(plan_cluster, reduce_rate, MEASURED),
                                       FIELD(plan_cluster, speed, MEASURED),
                                       FIELD(plan_cluster, node_latency_s, NUMBER),
                                       FIELD(plan_cluster, inter_latency_s, NUMBER),
                                       FIELD(plan_cluster, trees, FLAG),
                                       END};
static const field cost_fields[] = {FIELD(plan_job, parameter_bytes, NUMBER),
                                    FIELD(plan_job, gradient_bytes, NUMBER),
                                    FIELD(plan_job, state_bytes, NUMBER),
                                    FIELD(plan_job, shard_bytes, NUMBER),
                                    FIELD(plan_job, other_bytes, NUMBER),
                                    FIELD(plan_job, live_parameters, NUMBER),
                                    FIELD(plan_job, optimizer_seconds, MEASURED),
                                    FIELD(plan_job, step_seconds, MEASURED),
                                    END};
static const field region_fields[] = {FIELD(plan_region, trainable, NUMBER),
                                      FIELD(plan_region, frozen, NUMBER),
                                      FIELD(plan_region, forward_flops, NUMBER),
                                      FIELD(plan_region, backward_flops, NUMBER),
                                      FIELD(plan_region, activation_bytes, NUMBER),
                                      FIELD(plan_region, forward_seconds, MEASURED),
                                      FIELD(plan_region, backward_seconds, MEASURED),
                                      FIELD(plan_region, unshard_seconds, MEASURED),
                                      FIELD(plan_region, reduce_seconds, MEASURED),
                                      FIELD(plan_region, beside, MEASURED),
                                      FIELD(plan_region, forward_copied_bytes, MEASURED),
                                      FIELD(plan_region, backward_copied_bytes, MEASURED),
                                      FIELD(plan_region, extra_gathers, MEASURED),
                                      FIELD(plan_region, stays, FLAG),
                                      END};
static const field linear_fields[] = {FIELD(plan_linear, rows, NUMBER),
                                      FIELD(plan_linear, trainable, NUMBER),
                                      FIELD(plan_linear, frozen, NUMBER),
                                      FIELD(plan_linear, share, NUMBER),
                                      FIELD(plan_linear, input_bytes, NUMBER),
                                      FIELD(plan_linear, output_bytes, NUMBER),
                                      FIELD(plan_linear, extra_gathers, MEASURED),
                                      END};
static const field constant_fields[] = {FIELD(plan_constants, usable, NUMBER),
                                        FIELD(plan_constants, activation_bytes, NUMBER),
                                        FIELD(plan_constants, cache, NUMBER), END};
static const field shape_fields[] = {
    FIELD(plan_shape, layers, NUMBER),    FIELD(plan_shape, hidden, NUMBER),
    FIELD(plan_shape, heads, NUMBER),     FIELD(plan_shape, kv_heads, NUMBER),
    FIELD(plan_shape, head_size, NUMBER), FIELD(plan_shape, intermediate, NUMBER),
    FIELD(plan_shape, vocab, NUMBER),     FIELD(plan_shape, positions, NUMBER),
    FIELD(plan_shape, gated, NUMBER),     FIELD(plan_shape, biases, NUMBER),
    FIELD(plan_shape, tied, NUMBER),      FIELD(plan_shape, lora_rank, NUMBER),
    FIELD(plan_shape, sequence, NUMBER),  FIELD(plan_shape, recompute, NUMBER),
    FIELD(plan_shape, scores, NUMBER),    END};
static const field schedule_fields[] = {FIELD(plan_schedule, prefetch, WHOLE),
                                        FIELD(plan_schedule, n_steps, WHOLE),
                                        FIELD(plan_schedule, micro_batches, WHOLE),
                                        FIELD(plan_schedule, no_overlap, FLAG),
                                        FIELD(plan_schedule, host_computes, FLAG),
                                        FIELD(plan_schedule, flat_gather, FLAG),
                                        FIELD(plan_schedule, reduce_times, NUMBER),
                                        FIELD(plan_schedule, differences, NUMBER),
                                        FIELD(plan_schedule, coalesce_bytes, NUMBER),
                                        FIELD(plan_schedule, host_seconds, NUMBER),
                                        FIELD(plan_schedule, gather_cores, NUMBER),
                                        FIELD(plan_schedule, reduce_cores, NUMBER),
                                        FIELD(plan_schedule, jitter, NUMBER),
                                        FIELD(plan_schedule, seed, WHOLE),
                                        END};
static const field memory_fields[] = {FIELD(plan_memory, state, NUMBER),
                                      FIELD(plan_memory, cache, NUMBER),
                                      FIELD(plan_memory, gathered, NUMBER),
                                      FIELD(plan_memory, activations, NUMBER),
                                      FIELD(plan_memory, other, NUMBER),
                                      FIELD(plan_memory, total, NUMBER),
                                      FIELD(plan_memory, limit, NUMBER),
                                      FIELD(plan_memory, host, NUMBER),
                                      FIELD(plan_memory, file, NUMBER),
                                      FIELD(plan_memory, fits, FLAG),
                                      END};
static const field step_fields[] = {
    FIELD(plan_step, seconds, NUMBER),
    FIELD(plan_step, compute_seconds, NUMBER),
    FIELD(plan_step, agreement_seconds, NUMBER),
    {"inter_seconds", offsetof(plan_step, busy_seconds[PLAN_LINK_INTER]), NUMBER},
    {"node_seconds", offsetof(plan_step, busy_seconds[PLAN_LINK_NODE]), NUMBER},
    {"to_device_seconds", offsetof(plan_step, busy_seconds[PLAN_LINK_TO_DEVICE]), NUMBER},
    {"to_host_seconds", offsetof(plan_step, busy_seconds[PLAN_LINK_TO_HOST]), NUMBER},
    {"file_seconds", offsetof(plan_step, busy_seconds[PLAN_LINK_FILE]), NUMBER},
    FIELD(plan_step, gather_core_seconds, NUMBER),
    FIELD(plan_step, reduce_core_seconds, NUMBER),
    FIELD(plan_step, forward_inter, NUMBER),
    FIELD(plan_step, backward_inter, NUMBER),
    FIELD(plan_step, reduce_inter, NUMBER),
    FIELD(plan_step, to_device, NUMBER),
    FIELD(plan_step, to_host, NUMBER),
    FIELD(plan_step, file, NUMBER),
    FIELD(plan_step, n_operations, NUMBER),
    END};
static const field found_fields[] = {FIELD(plan_found, seconds, NUMBER),
                                     FIELD(plan_found, device_bytes, NUMBER),
                                     FIELD(plan_found, host_bytes, NUMBER),
                                     FIELD(plan_found, bound, NUMBER),
                                     FIELD(plan_found, is_exact, FLAG),
                                     FIELD(plan_found, fits, FLAG),
                                     END};

static const field limit_fields[] = {
    FIELD(plan_limits, device_bytes, NUMBER), FIELD(plan_limits, host_bytes, NUMBER),
    FIELD(plan_limits, ahead, WHOLE),         FIELD(plan_limits, n_splits, WHOLE),
    FIELD(plan_limits, max_states, WHOLE),    END};

static bool set_field(void *at, kind kind, PyObject *value, const char *name) {
    double number = PyFloat_AsDouble(value);
    if (PyErr_Occurred()) return false;
    if (kind == NUMBER || kind == MEASURED) {
        *(double *)at = number;
    } else if (kind == FLAG) {
        *(bool *)at = number != 0;
    } else if (number >= 0 && number <= UINT32_MAX && number == (double)(uint32_t)number) {
        *(uint32_t *)at = (uint32_t)number;
    } else {
        PyErr_Format(PyExc_ValueError, "%s is no whole number from 0 to 4294967295", name);
        return false;
    }
    return true;
}

/* `struct_out` from a dict with these keys and no others. */
static bool from_dict(PyObject *dict, const field *fields, void *struct_out) {
    Py_ssize_t n = 0;
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "a dict is expected");
        return false;
    }
    for (const field *f = fields; f->name; f++) {
        PyObject *value = PyDict_GetItemString(dict, f->name);
        if (!value && f->kind == MEASURED) {
            *(double *)((char *)struct_out + f->at) = 0;
            continue;
        }
        if (!value) {
            PyErr_Format(PyExc_KeyError, "no %s", f->name);
            return false;
        }
        if (!set_field((char *)struct_out + f->at, f->kind, value, f->name)) return false;
        n++;
    }
    if (PyDict_Size(dict) == n) return true;
    PyErr_Format(PyExc_KeyError, "%zd keys, where there are %zd", PyDict_Size(dict), n);
    return false;
}

static PyObject *to_dict(const field *fields, const void *from) {
    PyObject *dict = PyDict_New();
    for (const field *f = fields; dict && f->name; f++) {
        const char *at = (const char *)from + f->at;
        if (f->kind == MEASURED && *(const double *)at <= 0) continue;
        PyObject *value = f->kind == NUMBER || f->kind == MEASURED ? PyFloat_FromDouble(*(const double *)at)
                          : f->kind == FLAG ? PyBool_FromLong(*(const bool *)at)
                                            : PyLong_FromUnsignedLong(*(const uint32_t *)at);
        if (!value || PyDict_SetItemString(dict, f->name, value) < 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

/* What several functions take. Zeroed first, so that it can always be freed. */
typedef struct arguments {
    plan_job job;
    plan_region *regions;
    plan_linear *linears;
    plan_cluster cluster;
    uint8_t *tiers, *parts;
    unsigned mode;
} arguments;

static void arguments_free(arguments *a) {
    free(a->regions);
    free(a->linears);
    free(a->tiers);
    free(a->parts);
}

static bool take_regions(PyObject *list, arguments *a) {
    Py_ssize_t n = PyList_Check(list) ? PyList_Size(list) : -1;
    if (n < 1) {
        PyErr_SetString(PyExc_ValueError, "a list of regions is expected");
        return false;
    }
    a->regions = calloc((size_t)n, sizeof *a->regions);
    if (!a->regions) return PyErr_NoMemory(), false;
    for (Py_ssize_t i = 0; i < n; i++)
        if (!from_dict(PyList_GetItem(list, i), region_fields, &a->regions[i])) return false;
    a->job.n_regions = (size_t)n;
    a->job.regions = a->regions;
    return true;
}

/* `lists`: of each region its linear layers. */
static bool take_linears(PyObject *lists, arguments *a) {
    size_t n = a->job.n_regions, n_all = 0;
    bool is_good = PyList_Check(lists) && (size_t)PyList_Size(lists) == n;
    for (size_t i = 0; is_good && i < n; i++) {
        PyObject *list = PyList_GetItem(lists, (Py_ssize_t)i);
        is_good = PyList_Check(list);
        n_all += is_good ? (size_t)PyList_Size(list) : 0;
    }
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "a list of linear layers per region is expected");
        return false;
    }
    plan_linear *next = a->linears = calloc(n_all + 1, sizeof *next);
    if (!next) return PyErr_NoMemory(), false;
    for (size_t i = 0; i < n; i++) {
        PyObject *list = PyList_GetItem(lists, (Py_ssize_t)i);
        a->regions[i].linears = next;
        a->regions[i].n_linears = (size_t)PyList_Size(list);
        for (size_t k = 0; k < a->regions[i].n_linears; k++)
            if (!from_dict(PyList_GetItem(list, (Py_ssize_t)k), linear_fields, next++)) return false;
    }
    return true;
}

/* A copy, as numbers; freed with the arguments. */
static bool keep_bytes(const char *bytes, Py_ssize_t n, uint8_t **out) {
    *out = malloc((size_t)n);
    if (!*out) return PyErr_NoMemory(), false;
    memcpy(*out, bytes, (size_t)n);
    return true;
}

/* `parts`: a byte per region, of what can be. */
static bool take_parts(const char *bytes, Py_ssize_t n, arguments *a) {
    bool is_good = (size_t)n == a->job.n_regions;
    for (Py_ssize_t i = 0; is_good && i < n; i++)
        is_good = bytes[i] >= 1 && plan_can_split(&a->regions[i], (uint8_t)bytes[i]);
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "a number of parts per region is expected");
        return false;
    }
    return keep_bytes(bytes, n, &a->parts);
}

static bool take_cluster(PyObject *dict, plan_cluster *cluster) {
    if (!from_dict(dict, cluster_fields, cluster)) return false;
    if (cluster->n_nodes >= 1 && cluster->gpus_per_node >= 1 && plan_n_gpus(cluster) < 1 << 24) return true;
    PyErr_SetString(PyExc_ValueError, "too few or too many nodes, or GPUs");
    return false;
}

static bool take_mode(unsigned mode) {
    if (mode < PLAN_N_MODES) return true;
    PyErr_SetString(PyExc_ValueError, "no such mode");
    return false;
}

/* `tiers`: a byte per region. */
static bool take_tiers(const char *bytes, Py_ssize_t n, arguments *a) {
    bool is_good = (size_t)n == a->job.n_regions;
    for (Py_ssize_t i = 0; is_good && i < n; i++) is_good = (uint8_t)bytes[i] < PLAN_N_TIERS;
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "a tier per region is expected");
        return false;
    }
    return keep_bytes(bytes, n, &a->tiers);
}

static bool take_job(PyObject *costs, PyObject *regions, PyObject *cluster, unsigned mode, const char *tiers,
                     Py_ssize_t n_tiers, arguments *a) {
    return from_dict(costs, cost_fields, &a->job) && take_regions(regions, a) &&
           take_cluster(cluster, &a->cluster) && take_mode(mode) && take_tiers(tiers, n_tiers, a);
}

static PyObject *raise_failure(void) {
    const char *text = fcdp_error_text();
    PyErr_SetString(PyExc_RuntimeError, text && *text ? text : "no memory");
    return NULL;
}

/* describe(shape, batch, constants, costs) -> (costs with other_bytes, [region]) */
static PyObject *describe(PyObject *self, PyObject *args) {
    PyObject *shape_dict, *constants_dict, *costs;
    plan_shape shape;
    plan_constants constants;
    plan_job job = {0};
    double batch;
    (void)self;
    if (!PyArg_ParseTuple(args, "OdOO:describe", &shape_dict, &batch, &constants_dict, &costs) ||
        !from_dict(shape_dict, shape_fields, &shape) ||
        !from_dict(constants_dict, constant_fields, &constants) || !from_dict(costs, cost_fields, &job))
        return NULL;
    if (!(shape.layers >= 1 && shape.layers <= 1e6))
        return PyErr_Format(PyExc_ValueError, "layers: 1 to 1000000");
    size_t n = plan_shape_n_regions(&shape);
    plan_region *regions = calloc(n, sizeof *regions);
    if (!regions) return PyErr_NoMemory();
    plan_shape_describe(&shape, batch, &constants, &job, regions);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *dict = to_dict(region_fields, &regions[i]);
        if (!dict || PyList_Append(list, dict) < 0) Py_CLEAR(list);
        Py_XDECREF(dict);
    }
    free(regions);
    return list ? Py_BuildValue("(NN)", to_dict(cost_fields, &job), list) : NULL;
}

/* memory(costs, regions, cluster, mode, tiers, constants) -> dict */
static PyObject *memory(PyObject *self, PyObject *args) {
    PyObject *costs, *regions, *cluster, *constants_dict, *result = NULL;
    const char *tiers;
    Py_ssize_t n_tiers;
    arguments a = {0};
    plan_constants constants;
    plan_memory found;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOIy#O:memory", &costs, &regions, &cluster, &a.mode, &tiers, &n_tiers,
                          &constants_dict))
        return NULL;
    if (take_job(costs, regions, cluster, a.mode, tiers, n_tiers, &a) &&
        from_dict(constants_dict, constant_fields, &constants)) {
        plan_memory_of(&a.job, &a.cluster, (plan_mode)a.mode, a.tiers, &constants, &found);
        result = to_dict(memory_fields, &found);
    }
    arguments_free(&a);
    return result;
}

/* largest_batch(shape, costs, cluster, mode, tier, constants) -> per GPU */
static PyObject *largest_batch(PyObject *self, PyObject *args) {
    PyObject *shape_dict, *costs, *cluster_dict, *constants_dict;
    plan_shape shape;
    plan_job job = {0};
    plan_cluster cluster;
    plan_constants constants;
    unsigned mode, tier;
    double batch;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOIIO:largest_batch", &shape_dict, &costs, &cluster_dict, &mode, &tier,
                          &constants_dict) ||
        !from_dict(shape_dict, shape_fields, &shape) || !from_dict(costs, cost_fields, &job) ||
        !take_cluster(cluster_dict, &cluster) || !take_mode(mode) ||
        !from_dict(constants_dict, constant_fields, &constants))
        return NULL;
    if (tier >= PLAN_N_TIERS) return PyErr_Format(PyExc_ValueError, "no such tier");
    if (!plan_largest_batch(&shape, &job, &cluster, (plan_mode)mode, (plan_tier)tier, &constants, &batch))
        return PyErr_NoMemory();
    return PyLong_FromDouble(batch);
}

/* simulate(costs, regions, cluster, mode, tiers, schedule) -> dict */
static PyObject *simulate(PyObject *self, PyObject *args) {
    PyObject *costs, *regions, *cluster, *schedule_dict, *result = NULL;
    const char *tiers;
    Py_ssize_t n_tiers;
    arguments a = {0};
    plan_schedule schedule;
    plan_step step;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOIy#O:simulate", &costs, &regions, &cluster, &a.mode, &tiers, &n_tiers,
                          &schedule_dict))
        return NULL;
    if (take_job(costs, regions, cluster, a.mode, tiers, n_tiers, &a) &&
        from_dict(schedule_dict, schedule_fields, &schedule)) {
        bool is_good;
        if (!schedule.n_steps || !schedule.micro_batches || schedule.micro_batches > 10000 ||
            schedule.prefetch > 10000) {
            PyErr_SetString(PyExc_ValueError, "steps and micro-batches are at least 1, and at most 10000");
        } else {
            Py_BEGIN_ALLOW_THREADS is_good = plan_simulate(&a.job, &a.cluster, (plan_mode)a.mode, a.tiers,
                                                           &schedule, &step);
            Py_END_ALLOW_THREADS result = is_good ? to_dict(step_fields, &step) : raise_failure();
        }
    }
    arguments_free(&a);
    return result;
}

/* ([choice], dict) of what plan_search gives. */
static PyObject *search_choices(const plan_choice *choices, size_t n, size_t n_choices, double device,
                                double host, size_t max_states) {
    uint8_t *chosen = calloc(n + 1, 1);
    plan_found found;
    bool is_good = false;
    if (chosen) {
        Py_BEGIN_ALLOW_THREADS is_good = plan_search(choices, n, n_choices, device, host, INFINITY,
                                                     max_states, chosen, &found);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = NULL;
    if (!is_good)
        PyErr_NoMemory();
    else
        result = Py_BuildValue("(y#N)", (const char *)chosen, (Py_ssize_t)n, to_dict(found_fields, &found));
    free(chosen);
    return result;
}

/* spread_tiers(costs, regions, cluster, tiers, parts) -> bytes */
static PyObject *spread_tiers(PyObject *self, PyObject *args) {
    PyObject *costs, *regions, *cluster, *result = NULL;
    const char *tiers, *parts;
    Py_ssize_t n_tiers, n_parts;
    arguments a = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOy#y#:spread_tiers", &costs, &regions, &cluster, &tiers, &n_tiers, &parts,
                          &n_parts))
        return NULL;
    if (take_job(costs, regions, cluster, PLAN_FCDP, tiers, n_tiers, &a)) {
        if ((size_t)n_parts == a.job.n_regions) {
            plan_tiers_spread(&a.job, (const uint8_t *)parts, a.tiers);
            result = PyBytes_FromStringAndSize((const char *)a.tiers, (Py_ssize_t)a.job.n_regions);
        } else {
            PyErr_SetString(PyExc_ValueError, "a number of parts per region is expected");
        }
    }
    arguments_free(&a);
    return result;
}

static PyObject *list_of_pieces(const arguments *a, uint32_t ahead) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < a->job.n_regions; i++) {
        size_t n = plan_split_n_pieces(&a->regions[i], a->parts[i]);
        plan_region *pieces = calloc(n, sizeof *pieces);
        PyObject *own = pieces ? PyList_New(0) : PyErr_NoMemory();
        if (own) plan_split(&a->regions[i], &a->job, a->parts[i], ahead, pieces);
        for (size_t k = 0; own && k < n; k++) {
            PyObject *dict = to_dict(region_fields, &pieces[k]);
            if (!dict || PyList_Append(own, dict) < 0) Py_CLEAR(own);
            Py_XDECREF(dict);
        }
        if (!own || PyList_Append(list, own) < 0) Py_CLEAR(list);
        Py_XDECREF(own);
        free(pieces);
    }
    return list;
}

/* split(costs, regions, linears, parts, ahead) -> [[region]] */
static PyObject *split(PyObject *self, PyObject *args) {
    PyObject *costs, *regions, *linears, *result = NULL;
    const char *parts;
    Py_ssize_t n_parts;
    unsigned ahead;
    arguments a = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOy#I:split", &costs, &regions, &linears, &parts, &n_parts, &ahead))
        return NULL;
    if (from_dict(costs, cost_fields, &a.job) && take_regions(regions, &a) && take_linears(linears, &a) &&
        take_parts(parts, n_parts, &a))
        result = list_of_pieces(&a, ahead);
    arguments_free(&a);
    return result;
}

/* choose(costs, regions, linears, cluster, limits) -> (tiers, parts, dict) */
static PyObject *choose(PyObject *self, PyObject *args) {
    PyObject *costs, *regions, *linears, *cluster, *limits_dict, *result = NULL;
    arguments a = {0};
    plan_limits limits;
    plan_found found;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOO:choose", &costs, &regions, &linears, &cluster, &limits_dict))
        return NULL;
    if (from_dict(costs, cost_fields, &a.job) && take_regions(regions, &a) && take_linears(linears, &a) &&
        take_cluster(cluster, &a.cluster) && from_dict(limits_dict, limit_fields, &limits)) {
        bool is_good = limits.n_splits >= 1 && limits.n_splits <= PLAN_N_SPLITS && limits.max_states >= 1;
        if (!is_good) PyErr_Format(PyExc_ValueError, "1 to %d splits, and room for a state", PLAN_N_SPLITS);
        if (is_good && (!(a.tiers = calloc(a.job.n_regions, 1)) || !(a.parts = calloc(a.job.n_regions, 1)))) {
            PyErr_NoMemory();
            is_good = false;
        }
        if (is_good) {
            Py_BEGIN_ALLOW_THREADS is_good = plan_choose(&a.job, &a.cluster, &limits, a.tiers, a.parts,
                                                         &found);
            Py_END_ALLOW_THREADS Py_ssize_t n = (Py_ssize_t)a.job.n_regions;
            result = is_good ? Py_BuildValue("(y#y#N)", (const char *)a.tiers, n, (const char *)a.parts, n,
                                             to_dict(found_fields, &found))
                             : raise_failure();
        }
    }
    arguments_free(&a);
    return result;
}

/* A choice from (seconds, device_bytes, host_bytes). */
static bool take_choice(PyObject *tuple, plan_choice *choice) {
    return PyArg_ParseTuple(tuple, "ddd", &choice->seconds, &choice->device_bytes, &choice->host_bytes);
}

/* search([[(seconds, device_bytes, host_bytes)]], device_budget, host_budget, max_states) -> (bytes, dict) */
static PyObject *search(PyObject *self, PyObject *args) {
    PyObject *rows, *result = NULL;
    double device, host;
    Py_ssize_t max_states;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!ddn:search", &PyList_Type, &rows, &device, &host, &max_states))
        return NULL;
    Py_ssize_t n = PyList_Size(rows), n_choices = n ? PyObject_Size(PyList_GetItem(rows, 0)) : 0;
    if (n_choices < 1 || n_choices > UINT8_MAX || max_states < 1)
        return PyErr_Format(PyExc_ValueError, "1 to 255 choices of each region, and room for a state");
    plan_choice *choices = calloc((size_t)(n * n_choices), sizeof *choices);
    if (!choices) return PyErr_NoMemory();
    bool is_good = true;
    for (Py_ssize_t i = 0; is_good && i < n * n_choices; i++) {
        PyObject *row = PyList_GetItem(rows, i / n_choices);
        if (!PyList_Check(row) || PyList_Size(row) != n_choices) {
            PyErr_SetString(PyExc_ValueError, "each region has as many choices as the others");
            is_good = false;
        } else {
            is_good = take_choice(PyList_GetItem(row, i % n_choices), &choices[i]);
        }
    }
    if (is_good)
        result = search_choices(choices, (size_t)n, (size_t)n_choices, device, host, (size_t)max_states);
    free(choices);
    return result;
}

static PyMethodDef methods[] = {
    {"search", search, METH_VARARGS,
     "search(choices, device_bytes, host_bytes, max_states) -> (chosen, dict)"},
    {"describe", describe, METH_VARARGS, "describe(shape, batch, constants, costs) -> (costs, regions)"},
    {"memory", memory, METH_VARARGS,
     "memory(costs, regions, cluster, mode, tiers, constants) -> dict of bytes"},
    {"largest_batch", largest_batch, METH_VARARGS,
     "largest_batch(shape, costs, cluster, mode, tier, constants) -> sequences per GPU; 0: none fits"},
    {"simulate", simulate, METH_VARARGS,
     "simulate(costs, regions, cluster, mode, tiers, schedule) -> dict, per step"},
    {"spread_tiers", spread_tiers, METH_VARARGS,
     "spread_tiers(costs, regions, cluster, tiers, parts) -> tiers, those on the device evenly among regions "
     "that are alike"},
    {"split", split, METH_VARARGS,
     "split(costs, regions, linears, parts, ahead) -> of each region the list of its pieces"},
    {"choose", choose, METH_VARARGS,
     "choose(costs, regions, linears, cluster, limits) -> (tiers, parts, dict)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT,
                                    "_plan",
                                    "The model of fcdp-plan, marshalled.",
                                    -1,
                                    methods,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL};

PyMODINIT_FUNC PyInit__plan(void) {
    PyObject *m = PyModule_Create(&module);
    static const char *const modes[PLAN_N_MODES] = {"FSDP2", "KEEP",    "HPZ", "HSDP",
                                                    "HFSDP", "OFFLOAD", "FCDP"};
    static const char *const tiers[PLAN_N_TIERS] = {"ON_DEVICE", "BY_SLICE", "WHOLE", "IN_FILE", "GATHERED"};
    for (int i = 0; m && i < PLAN_N_MODES; i++)
        if (PyModule_AddIntConstant(m, modes[i], i) < 0) Py_CLEAR(m);
    for (int i = 0; m && i < PLAN_N_TIERS; i++)
        if (PyModule_AddIntConstant(m, tiers[i], i) < 0) Py_CLEAR(m);
    if (m && PyModule_AddIntConstant(m, "N_SPLITS", PLAN_N_SPLITS) < 0) Py_CLEAR(m);
    return m;
}
