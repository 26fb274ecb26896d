/*
 * SPDK's environment, started once in a process by a short-lived thread; and SPDK's log messages.
 *
 * DPDK binds the thread that starts it to a CPU, and later all threads that this thread starts. A
 * separate thread that ends afterwards starts it, so that the program's threads keep their CPUs.
 * DPDK's single logical core may run on any CPU that the process may use, or on those of the
 * option.
 *
 * SPDK installs a handler for SIGBUS when it is loaded, for devices that are removed. It returns
 * from any other SIGBUS too, so that the faulting instruction runs again without end. Therefore the
 * code that loads this library restores the handler from before (dlfs/_native/spdk.py), and this
 * file installs SPDK's handler again when PCI is used.
 *
 * A short ring keeps SPDK's last error messages, for the messages of this library's errors.
 */
#include "platform/clock.h"
#include "platform/thread.h"
#include "shim.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <spdk/log.h>

#define LOG_LINES 16u
#define LOG_LINE_BYTES 200u
#define LOG_RAW_BYTES 1024u
#define LOG_ERRORS_MAX 3u /* the first errors name the cause, later ones are consequences */
#define CORES_BYTES 1024u

struct environment {
    pthread_mutex_t lock;
    bool started;
    bool pci;
    bool huge;
    int32_t shm_id;
    char cores[CORES_BYTES]; /* value of the option */
    _Atomic pid_t owner;     /* process that started it; 0 before */
    struct sigaction sigbus; /* SPDK's handler */
};

static struct environment environment = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    pthread_mutex_t lock;
    unsigned count;
    char lines[LOG_LINES][LOG_LINE_BYTES];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

void shim_sleep_ns(uint64_t duration_ns)
{
    struct timespec pause = clock_timespec(duration_ns);
    (void)nanosleep(&pause, NULL);
}

/* ---- SPDK's log ------------------------------------------------------------------------------ */

__attribute__((format(printf, 5, 0))) static void log_line(int level, const char *file, int line,
                                                           const char *function, const char *format,
                                                           va_list arguments)
{
    (void)file;
    (void)line;
    (void)function;
    if (level > SPDK_LOG_ERROR) {
        return;
    }
    char raw[LOG_RAW_BYTES];
    (void)vsnprintf(raw, sizeof raw, format, arguments);
    const char *text = raw;
    while (text[0] == '[' && strstr(text, "] ") != NULL) { /* skips addresses and states */
        text = strstr(text, "] ") + 2;
    }
    (void)pthread_mutex_lock(&ring.lock);
    (void)snprintf(ring.lines[ring.count % LOG_LINES], LOG_LINE_BYTES, "%.*s",
                   (int)strcspn(text, "\n"), text);
    ring.count++;
    (void)pthread_mutex_unlock(&ring.lock);
}

unsigned log_mark(void)
{
    (void)pthread_mutex_lock(&ring.lock);
    unsigned mark = ring.count;
    (void)pthread_mutex_unlock(&ring.lock);
    return mark;
}

void log_text(unsigned mark, char *text, size_t text_bytes)
{
    size_t used = 0;
    text[0] = '\0';
    (void)pthread_mutex_lock(&ring.lock);
    unsigned first = ring.count - mark > LOG_LINES ? ring.count - LOG_LINES : mark;
    unsigned last = ring.count - first > LOG_ERRORS_MAX ? first + LOG_ERRORS_MAX : ring.count;
    for (unsigned i = first; i != last && used < text_bytes; i++) {
        int wrote = snprintf(text + used, text_bytes - used, "%s%s", used > 0 ? "; " : "",
                             ring.lines[i % LOG_LINES]);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    (void)pthread_mutex_unlock(&ring.lock);
}

/* ---- starting -------------------------------------------------------------------------------- */

/* Runs after the constructors of SPDK's libraries. */
__attribute__((constructor)) static void on_load(void)
{
    (void)sigaction(SIGBUS, NULL, &environment.sigbus);
    spdk_log_open(log_line);
}

/* Lists the allowed CPUs in DPDK's form: "0,1,5". */
static int list_cpus(char *text, size_t text_bytes)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return -errno;
    }
    size_t used = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            int wrote = snprintf(text + used, text_bytes - used, "%s%zu", used > 0 ? "," : "", cpu);
            used += wrote > 0 ? (size_t)wrote : 0;
            if (used >= text_bytes) {
                return -E2BIG;
            }
        }
    }
    return used > 0 ? 0 : -EINVAL;
}

struct start {
    struct spdk_env_opts options;
    int code;
};

static void *start_main(void *argument)
{
    struct start *start = argument;
    start->code = spdk_env_init(&start->options);
    return NULL;
}

/* Starts the environment in a separate thread; the threads it starts inherit its blocked signals.
 */
static int start_in_thread(struct start *start)
{
    pthread_t thread;
    int code = thread_start(&thread, NULL, start_main, start);
    if (code == 0) {
        (void)pthread_join(thread, NULL);
        code = start->code;
    }
    return code;
}

static int start(const dlfs_spdk_config *config, bool huge, bool pci)
{
    char cpus[CORES_BYTES];
    char map[CORES_BYTES + 8];
    int error = 0;
    if (config->cores == NULL) {
        error = list_cpus(cpus, sizeof cpus);
    } else if (snprintf(cpus, sizeof cpus, "%s", config->cores) >= (int)sizeof cpus) {
        error = -EINVAL;
    }
    if (error < 0) {
        return error;
    }
    (void)snprintf(map, sizeof map, "0@(%s)", cpus);
    struct start setup = {.code = 0};
    setup.options.opts_size = sizeof setup.options;
    spdk_env_opts_init(&setup.options);
    setup.options.name = "dlfs";
    setup.options.core_mask = NULL;
    setup.options.lcore_map = map;
    setup.options.shm_id = config->shm_id < 0 ? -1 : config->shm_id;
    setup.options.no_pci = !pci;
    setup.options.no_huge = !huge;
    if (!huge || config->memory_mib > 0) {
        setup.options.mem_size = (int)config->memory_mib;
    }
    char quiet[] = "--log-level=lib.eal:error";
    setup.options.env_context = quiet;
    return start_in_thread(&setup);
}

/* Checks that the running environment has the configured options. */
static int check_running(const dlfs_spdk_config *config, bool needs_pci, char *message,
                         size_t message_bytes)
{
    const char *wrong = NULL;
    if (needs_pci && !environment.pci) {
        wrong = "without PCI: open PCIe devices first, or others with huge=1";
    } else if (config->huge != DLFS_SPDK_UNSET && (config->huge != 0) != environment.huge) {
        wrong = environment.huge ? "with huge pages" : "without huge pages";
    } else if (config->shm_id != DLFS_SPDK_UNSET && config->shm_id != environment.shm_id) {
        wrong = "with another shm_id";
    } else if (config->cores != NULL && strcmp(config->cores, environment.cores) != 0) {
        wrong = "on other cores";
    }
    if (wrong == NULL) {
        return 0;
    }
    (void)snprintf(message, message_bytes, "this process started SPDK %s", wrong);
    return -EBUSY;
}

static int start_first(const dlfs_spdk_config *config, bool needs_pci, char *message,
                       size_t message_bytes)
{
    bool huge = config->huge == DLFS_SPDK_UNSET ? needs_pci : config->huge != 0;
    bool pci = huge || needs_pci;
    unsigned mark = log_mark();
    int error = start(config, huge, pci);
    if (error < 0) {
        char spdk_text[512];
        log_text(mark, spdk_text, sizeof spdk_text);
        (void)snprintf(message, message_bytes, "start SPDK's environment %s huge pages%s: %s",
                       huge ? "with" : "without", huge ? " (of which some must be reserved)" : "",
                       spdk_text);
        return error;
    }
    if (pci) {
        (void)sigaction(SIGBUS, &environment.sigbus, NULL);
    }
    environment.started = true;
    environment.pci = pci;
    environment.huge = huge;
    environment.shm_id = config->shm_id;
    (void)snprintf(environment.cores, sizeof environment.cores, "%s",
                   config->cores != NULL ? config->cores : "");
    atomic_store(&environment.owner, getpid());
    return 0;
}

int environment_start(const dlfs_spdk_config *config, bool needs_pci, char *message,
                      size_t message_bytes)
{
    if (environment_is_foreign()) {
        (void)snprintf(message, message_bytes,
                       "this process is a fork of one that uses SPDK, which does not survive it");
        return DLFS_E_CLOSED;
    }
    (void)pthread_mutex_lock(&environment.lock);
    int error = environment.started ? check_running(config, needs_pci, message, message_bytes)
                                    : start_first(config, needs_pci, message, message_bytes);
    (void)pthread_mutex_unlock(&environment.lock);
    return error;
}

bool environment_is_foreign(void)
{
    pid_t owner = atomic_load(&environment.owner);
    return owner != 0 && owner != getpid();
}
