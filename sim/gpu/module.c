/* Modules, whose kernels are C functions that a test or a driver table brings (simgpu.h): loading, and
 * launches as kernels of a stream with what they access.
 *
 * An operation has few accesses and a launch may have many tasks, so that a launch becomes as many operations
 * as it takes, one behind another on the stream, where CUDA would run the blocks in any order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/gpu/internal.h"

enum { MAX_MODULES = 8, MAX_BLOCK_THREADS = 1024, MAX_RANGES = 4 };

struct range {
    uint64_t address, bytes;
};
struct head { /* what a task begins with; the ranges that its kernel does not have are all zeroes */
    struct range ranges[MAX_RANGES];
};

struct definition {
    char *image, *entry;
    size_t task_bytes;
    unsigned n_read, n_ranges;
    void (*run)(void *task);
};

/* A module has one kernel, so that a handle of either kind stands for a definition. */
static struct definition definitions[MAX_MODULES];
static unsigned n_definitions;
static struct sim_table module_table = {.tag = 0x4d};
static struct sim_table function_table = {.tag = 0x46};

struct module {
    const struct definition *of;
    uint64_t function; /* 0: not asked for yet */
};

static void module_drop(void *item) {
    struct module *module = item;
    if (module->function) simgpu__table_take(&function_table, module->function);
    free(module);
}

size_t simgpu__module_count(void) {
    return module_table.n_live;
}

void simgpu__module_reset(void) {
    simgpu__table_clear(&module_table, module_drop);
    for (unsigned i = 0; i < n_definitions; i++) {
        free(definitions[i].image);
        free(definitions[i].entry);
    }
    n_definitions = 0;
}

static struct definition *definition_of(const char *image) {
    for (unsigned i = 0; i < n_definitions; i++)
        if (strcmp(definitions[i].image, image) == 0) return &definitions[i];
    return NULL;
}

static bool has_entry(const char *image, const char *entry) {
    size_t length = strlen(entry);
    for (const char *at = image; (at = strstr(at, ".entry ")); at++)
        if (strncmp(at + 7, entry, length) == 0 && strchr(" (\n", at[7 + length])) return true;
    return false;
}

/* The text is the key: a driver that is opened again, or by another engine
 * of the process, brings the same one. */
static CUresult define_locked(const struct simgpu_module *module) {
    struct definition *of = definition_of(module->image);
    if (!of && n_definitions == MAX_MODULES) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!of) {
        char *image = strdup(module->image), *entry = strdup(module->entry);
        if (!image || !entry) {
            free(image);
            free(entry);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        of = &definitions[n_definitions++];
        *of = (struct definition){.image = image, .entry = entry};
    }
    of->task_bytes = module->task_bytes;
    of->n_read = module->n_read;
    of->n_ranges = module->n_read + module->n_written;
    of->run = module->run;
    return CUDA_SUCCESS;
}

int simgpu_module_define(const struct simgpu_module *module) {
    if (simgpu__forked()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!module || !module->image || !module->entry || !module->run || !module->n_read ||
        module->n_read > MAX_RANGES || module->n_written > MAX_RANGES - module->n_read ||
        module->task_bytes < (module->n_read + module->n_written) * sizeof(struct range) ||
        !has_entry(module->image, module->entry))
        return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(define_locked(module));
}

static CUresult load_locked(const char *image, CUmodule *module_out) {
    const struct definition *of = definition_of(image);
    if (!of) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    struct module *module = calloc(1, sizeof *module);
    if (!module) return CUDA_ERROR_OUT_OF_MEMORY;
    module->of = of;
    uint64_t id = simgpu__table_put(&module_table, module);
    if (!id) {
        free(module);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *module_out = (CUmodule)(uintptr_t)id;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module_out, const void *image) {
    SIM_ENTER(cuModuleLoadData);
    if (!module_out || !image) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(load_locked(image, module_out));
}

/* What has been launched goes on: it has its own copy of all that it needs. */
CUresult cuModuleUnload(CUmodule handle) {
    SIM_ENTER(cuModuleUnload);
    sim_lock();
    struct module *module = simgpu__table_take(&module_table, (uintptr_t)handle);
    if (module) module_drop(module);
    return sim_unlock_with(module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

static CUresult function_locked(CUmodule handle, const char *name, CUfunction *function_out) {
    struct module *module = simgpu__table_get(&module_table, (uintptr_t)handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    if (strcmp(module->of->entry, name) != 0) return CUDA_ERROR_NOT_FOUND;
    if (!module->function) module->function = simgpu__table_put(&function_table, module);
    if (!module->function) return CUDA_ERROR_OUT_OF_MEMORY;
    *function_out = (CUfunction)(uintptr_t)module->function;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function_out, CUmodule module, const char *name) {
    SIM_ENTER(cuModuleGetFunction);
    if (!function_out || !name) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(function_locked(module, name, function_out));
}

/* ---- launches ---- */

struct blocks { /* those that one operation runs */
    void (*run)(void *task);
    size_t task_bytes, n;
    unsigned n_ranges;
    char *tasks;
    struct head heads[]; /* at the launch */
};

static struct head head_of(const char *task, unsigned n_ranges) {
    struct head head = {0};
    memcpy(head.ranges, task, n_ranges * sizeof head.ranges[0]);
    return head;
}

static void changed(const struct blocks *blocks, size_t i) {
    const struct head now = head_of(blocks->tasks + i * blocks->task_bytes, blocks->n_ranges);
    const struct range *had = blocks->heads[i].ranges, *has = now.ranges;
    while (memcmp(had, has, sizeof *had) == 0) had++, has++;
    fprintf(stderr,
            "simgpu: the task at %p was changed before its block had run: it had %llu bytes at %#llx and has "
            "%llu at %#llx\n",
            (void *)(blocks->tasks + i * blocks->task_bytes), (unsigned long long)had->bytes,
            (unsigned long long)had->address, (unsigned long long)has->bytes,
            (unsigned long long)has->address);
    sim_lock();
    simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
    sim_unlock();
}

static void blocks_body(void *data) {
    const struct blocks *blocks = data;
    for (size_t i = 0; i < blocks->n; i++) {
        char *task = blocks->tasks + i * blocks->task_bytes;
        struct head head = head_of(task, blocks->n_ranges);
        if (memcmp(&head, &blocks->heads[i], sizeof head) != 0) {
            changed(blocks, i);
            return;
        }
        blocks->run(task);
    }
}

/* The range is among the operation's, or now is, behind the tasks. False: it has no room for it. */
static bool add_access(struct sim_op *op, struct range range, bool writes) {
    if (range.bytes == 0) return true;
    for (unsigned i = 1; i < op->n_accesses; i++) {
        struct simgpu_access *before = &op->accesses[i];
        if (before->address + before->bytes != range.address || !before->writes != !writes) continue;
        before->bytes += range.bytes;
        return true;
    }
    if (op->n_accesses == SIMGPU_MAX_ACCESSES) return false;
    op->accesses[op->n_accesses++] = (struct simgpu_access){range.address, range.bytes, writes};
    return true;
}

/* All of the task's. False: the operation is as it was. */
static bool add_task(struct sim_op *op, const struct definition *of, struct head head) {
    struct sim_op before = *op;
    for (unsigned i = 0; i < of->n_ranges; i++) {
        if (add_access(op, head.ranges[i], i >= of->n_read)) continue;
        *op = before;
        return false;
    }
    return true;
}

/* Enqueues as many of the n tasks as fit into one operation; how many, 0: no memory. */
static size_t push_some(struct sim_stream *stream, const struct definition *of, char *tasks, size_t n) {
    struct sim_op op = {.work = SIM_KERNEL, .function = blocks_body, .owns_user_data = true, .n_accesses = 1};
    size_t n_fit = 0, bytes = 0;
    while (n_fit < n && add_task(&op, of, head_of(tasks + n_fit * of->task_bytes, of->n_ranges))) n_fit++;
    struct blocks *blocks = malloc(sizeof *blocks + n_fit * sizeof blocks->heads[0]);
    if (!blocks) return 0;
    *blocks = (struct blocks){
        .run = of->run, .task_bytes = of->task_bytes, .n = n_fit, .n_ranges = of->n_ranges, .tasks = tasks};
    for (size_t i = 0; i < n_fit; i++) {
        blocks->heads[i] = head_of(tasks + i * of->task_bytes, of->n_ranges);
        for (unsigned k = 0; k < of->n_read; k++) bytes += blocks->heads[i].ranges[k].bytes;
    }
    op.user_data = blocks;
    op.accesses[0] = (struct simgpu_access){(uintptr_t)tasks, n_fit * of->task_bytes, 1};
    op.duration_ns = sim.memory_bytes_per_ns > 0 ? (uint64_t)((double)bytes / sim.memory_bytes_per_ns) : 0;
    simgpu__text_set(op.name, of->entry);
    return simgpu__stream_push(stream, &op) == CUDA_SUCCESS ? n_fit : 0;
}

/* The tasks can be read, and no address in them goes around the end of the address space. */
static bool tasks_are_legal(const struct definition *of, uint64_t tasks, size_t n) {
    if (simgpu__place_of(tasks, n * of->task_bytes) != SIM_PINNED) return false;
    for (size_t i = 0; i < n; i++) {
        struct head head = head_of((const char *)(uintptr_t)tasks + i * of->task_bytes, of->n_ranges);
        for (const struct range *r = head.ranges; r < head.ranges + of->n_ranges; r++)
            if (r->bytes && (!r->address || r->address + r->bytes < r->address)) return false;
    }
    return true;
}

/* A device would find these faults while it runs. The simulator finds them here, since it must read the tasks
 * here for their accesses. */
static CUresult launch_locked(CUfunction handle, size_t n_blocks, CUstream stream, uint64_t parameter) {
    const struct module *module = simgpu__table_get(&function_table, (uintptr_t)handle);
    struct sim_stream *on = simgpu__stream_of(stream);
    if (!module || !on) return CUDA_ERROR_INVALID_HANDLE;
    const struct definition *of = module->of;
    char *tasks = (char *)(uintptr_t)parameter;
    if (!tasks_are_legal(of, parameter, n_blocks)) {
        /* here and now, where a device would come to it later */
        simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    for (size_t i = 0; i < n_blocks;) {
        size_t n = push_some(on, of, tasks + i * of->task_bytes, n_blocks - i);
        if (n == 0) return CUDA_ERROR_OUT_OF_MEMORY;
        i += n;
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z,
                        unsigned int shared_bytes, CUstream stream, void **parameters, void **extra) {
    SIM_ENTER(cuLaunchKernel);
    uint64_t parameter;
    if (grid_x == 0 || grid_x > INT32_MAX || block_x == 0 || block_x > MAX_BLOCK_THREADS || !parameters ||
        !parameters[0])
        return CUDA_ERROR_INVALID_VALUE;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes || extra)
        return CUDA_ERROR_NOT_SUPPORTED;
    memcpy(&parameter, parameters[0], sizeof parameter);
    sim_lock();
    return sim_unlock_with(launch_locked(function, grid_x, stream, parameter));
}
