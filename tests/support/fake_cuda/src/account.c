/* How much memory of each device is used, by all processes of one fake machine, and which allocations are refused.
 *
 * FAKE_CUDA_MACHINE names a file that processes share: each has a line in it. Without it a process is alone. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_PROCESSES 256

struct process {
    pid_t pid;
    uint64_t used[MAX_DEVICES];
};

static struct process alone, *processes, *own;
static int64_t fails_after = -1; /* how many more allocations succeed; -1: all */
static bool is_banned;

static bool is_gone(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

static struct process *own_line(void) {
    if (own != NULL && own->pid == getpid()) return own;
    const char *path = getenv("FAKE_CUDA_MACHINE");
    alone.pid = getpid();
    own = &alone;
    if (path == NULL || *path == '\0') return own;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t size = MAX_PROCESSES * sizeof *processes;
    if (file < 0 || ftruncate(file, (off_t)size) != 0) return own;
    processes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (processes == MAP_FAILED) {
        processes = NULL;
        return own;
    }
    for (int i = 0; i < MAX_PROCESSES; i++) {
        pid_t there = processes[i].pid;
        if (there != 0 && !is_gone(there)) continue;
        if (!__sync_bool_compare_and_swap(&processes[i].pid, there, getpid())) continue;
        own = &processes[i];
        for (int device = 0; device < MAX_DEVICES; device++) own->used[device] = alone.used[device];
        break;
    }
    return own;
}

void account(int device, int64_t size) { own_line()->used[device] += (uint64_t)size; }

uint64_t used_bytes(int device) {
    struct process *mine = own_line();
    if (processes == NULL) return mine->used[device];
    uint64_t used = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (processes[i].pid != 0 && !is_gone(processes[i].pid)) used += processes[i].used[device];
    return used;
}

bool may_allocate(int device, size_t size, const char *what) {
    if (is_banned) complain("%s of %zu bytes where nothing may be allocated", what, size);
    if (fails_after == 0) return false;
    if (fails_after > 0) fails_after--;
    return used_bytes(device) + size <= device_total_bytes();
}

void note_pinning(void) {
    if (is_banned) complain("host memory is pinned where nothing may be allocated");
}

/* For tests: so many more allocations succeed, then all fail; -1: none fails. */
EXPORT void fake_cuda_fail_after(int64_t count) { fails_after = count; }
/* For tests: every allocation is a complaint. */
EXPORT void fake_cuda_ban_allocations(int on) { is_banned = on != 0; }

int processes_of(int device, int *pids, int most) {
    int found = 0;
    own_line();
    for (int i = 0; processes != NULL && i < MAX_PROCESSES && found < most; i++)
        if (processes[i].pid != 0 && !is_gone(processes[i].pid) && processes[i].used[device] > 0)
            pids[found++] = processes[i].pid;
    return found;
}

__attribute__((constructor)) static void begin(void) {
    fails_after = (int64_t)setting("FAKE_CUDA_FAIL_AFTER", (uint64_t)-1);
}
__attribute__((destructor)) static void end(void) {
    if (processes != NULL && own->pid == getpid()) own->pid = 0;
}
