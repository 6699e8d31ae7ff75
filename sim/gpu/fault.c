/* Counts the calls of every entry point and fails the one that a test asked for. */
#include <string.h>

#include "sim/gpu/internal.h"

static const char *const names[SIM_N_ENTRIES] = {
#define X(name, need) [SIM_##name] = #name,
    SIM_ENTRIES(X)
#undef X
};

static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long calls[SIM_N_ENTRIES];
static unsigned long total_calls;
static int armed_entry;              /* SIM_N_ENTRIES: any */
static unsigned long calls_to_fault; /* 0: nothing is armed */
static int armed_code;

const char *simgpu_entry_name(unsigned i) {
    return i < SIM_N_ENTRIES ? names[i] : NULL;
}

int simgpu__fault_find(const char *name) {
    if (!name || strcmp(name, "any") == 0) return SIM_N_ENTRIES;
    size_t length = strlen(name);
    for (int i = 0; i < SIM_N_ENTRIES; i++) {
        bool begins = strncmp(names[i], name, length) == 0;
        if (begins && (names[i][length] == '\0' || strcmp(names[i] + length, "_v2") == 0)) return i;
    }
    return -1;
}

void simgpu__fault_arm(int entry, unsigned long n, int code) {
    pthread_mutex_lock(&fault_lock);
    armed_entry = entry;
    calls_to_fault = n;
    armed_code = code;
    pthread_mutex_unlock(&fault_lock);
}

CUresult simgpu__fault_count(enum sim_entry entry) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&fault_lock);
    calls[entry]++;
    total_calls++;
    bool hit = calls_to_fault && (armed_entry == SIM_N_ENTRIES || armed_entry == (int)entry);
    if (hit && --calls_to_fault == 0) result = (CUresult)armed_code;
    pthread_mutex_unlock(&fault_lock);
    return result;
}

void simgpu__fault_clear(void) {
    pthread_mutex_lock(&fault_lock);
    memset(calls, 0, sizeof calls);
    total_calls = 0;
    calls_to_fault = 0;
    pthread_mutex_unlock(&fault_lock);
}

void simgpu_calls_reset(void) {
    if (simgpu__forked()) return;
    pthread_mutex_lock(&fault_lock);
    memset(calls, 0, sizeof calls);
    total_calls = 0;
    pthread_mutex_unlock(&fault_lock);
}

int simgpu_fail_nth(const char *entry, unsigned long n, int code) {
    int found = simgpu__fault_find(entry);
    if (found < 0) return -1;
    if (simgpu__forked()) return 0;
    simgpu__settings_load();
    simgpu__fault_arm(found, n, code);
    return 0;
}

unsigned long simgpu_calls(const char *entry) {
    int found = simgpu__fault_find(entry);
    if (found < 0 || simgpu__forked()) return 0;
    pthread_mutex_lock(&fault_lock);
    unsigned long n = found == SIM_N_ENTRIES ? total_calls : calls[found];
    pthread_mutex_unlock(&fault_lock);
    return n;
}
