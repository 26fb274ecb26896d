/*
 * Tests a real native mount: threads read all files of a dataset on a device that fails now and
 * then, while the owner replies to upcalls; the mount ends when it is idle and when it is in use.
 *
 * Exits with 77 (skipped) on a machine that cannot mount.
 */
#include <dlfs/dlfs.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "dlfs_fuse.h"
#include "fuse/owner.h"
#include "mount.h"
#include "reader/reader_tests.h"

#define SKIPPED 77
#define THREADS 4u
#define SINGLE_READS 50u
#define BUSY_POLL_US 200u
#define INIT_BYTES_MAX 16384u
#define REQUEST_BYTES (1u << 20) /* memory of a request over io_uring */
/* Flag of a test: INIT is that of a kernel that sends OPEN and OPENDIR for each file. */
#define OPENS_FILES (1u << 31)

static _Atomic bool lacks_memory;

struct mount {
    dlfs_fuse *fuse;
    dlfs_reader *reader;
    int kernel; /* descriptor of /dev/fuse */
    char path[64];
    pthread_t runner;
    struct owner owner;
    _Atomic bool ending;
    bool nested; /* the dataset is in the directory of a volume, `pets` */
};

static void *run(void *argument)
{
    struct mount *mount = argument;
    CHECK_EQ(dlfs_fuse_run(mount->fuse), 0);
    return NULL;
}

/* Mounts. Returns the bytes of INIT, or -1 on a machine that cannot mount. */
static ssize_t mount_file_system(struct mount *made, uint8_t *init)
{
    char options[96];
    made->kernel = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    CHECK(made->kernel >= 0);
    (void)snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0",
                   made->kernel);
    if (mount("dlfs", made->path, "fuse.dlfs", MS_RDONLY | MS_NOSUID | MS_NODEV, options) != 0) {
        CHECK_EQ(close(made->kernel), 0);
        return -1;
    }
    ssize_t got = read(made->kernel, init, INIT_BYTES_MAX);
    CHECK(got > 0);
    return got;
}

/* Makes an INIT request that of a kernel that opens files. */
static void open_files(uint8_t *init)
{
    uint8_t *flags = init + sizeof(struct fuse_in_header) + offsetof(struct fuse_init_in, flags);
    uint32_t found;
    memcpy(&found, flags, sizeof found);
    found &= ~(uint32_t)(FUSE_NO_OPEN_SUPPORT | FUSE_NO_OPENDIR_SUPPORT);
    memcpy(flags, &found, sizeof found);
}

static bool mount_begin(struct mount *mount, const struct dataset *dataset, uint32_t flags,
                        uint32_t busy_poll_us)
{
    uint8_t init[INIT_BYTES_MAX];
    ssize_t init_bytes = mount_file_system(mount, init);
    if (init_bytes < 0) {
        return false;
    }
    if (flags & OPENS_FILES) {
        open_files(init);
    }
    const dlfs_fuse_config config = {
        .uid = getuid(),
        .gid = getgid(),
        .file_mode = 0444,
        .threads_max = 8,
        .flags = flags & ~OPENS_FILES,
        .busy_poll_us = busy_poll_us,
        .kernel = mount->kernel,
        .init = init,
        .init_bytes = (uint64_t)init_bytes,
    };
    mount->ending = false;
    mount->reader = reader_over(dataset, 1 << 20, 8);
    CHECK_EQ(dlfs_fuse_create(&config, &mount->fuse), 0);
    CHECK_EQ(dlfs_fuse_add_dataset(mount->fuse, DATASET, 9, 0, 1000), 0);
    CHECK_EQ(pthread_create(&mount->runner, NULL, run, mount), 0);
    mount->owner = (struct owner){.fuse = mount->fuse,
                                  .directory = dataset->directory,
                                  .reader = mount->reader,
                                  .nested = mount->nested};
    owner_begin(&mount->owner);
    return true;
}

static void mount_end(struct mount *mount)
{
    dlfs_fuse_stop(mount->fuse);
    CHECK_EQ(pthread_join(mount->runner, NULL), 0);
    owner_end(&mount->owner);
    CHECK_EQ(dlfs_fuse_withdraw_dataset(mount->fuse, DATASET), 0);
    CHECK_EQ(umount2(mount->path, MNT_DETACH), 0);
    dlfs_fuse_destroy(mount->fuse);
    CHECK_EQ(close(mount->kernel), 0);
    CHECK_EQ(dlfs_reader_destroy(mount->reader), 0);
}

/* Reads a file in parts of a given size. Returns false if the mount has ended. */
static bool read_file(const struct mount *mount, uint64_t index, size_t part)
{
    static _Thread_local uint8_t data[1 << 17];
    char path[96];
    (void)snprintf(path, sizeof path, "%s/data/%06" PRIu64, mount->path, index);
    int file = open(path, O_RDONLY);
    uint64_t at = 0;
    ssize_t got = -1;
    while (file >= 0 && (got = read(file, data + at, part)) > 0) {
        at += (uint64_t)got;
    }
    if (file >= 0) {
        (void)close(file);
    }
    if (file < 0 || got < 0) {
        CHECK(atomic_load(&mount->ending));
        return false;
    }
    CHECK_EQ(at, sample_length(index));
    check_bytes(data, index);
    return true;
}

struct reading {
    struct mount *mount;
    uint64_t first;
    uint64_t step;
    pthread_t thread;
};

static void *read_files(void *argument)
{
    const struct reading *reading = argument;
    for (uint64_t i = 0; i < COUNT; i++) {
        if (!read_file(reading->mount, (reading->first + i * reading->step) % COUNT,
                       i % 3 == 0 ? 1 << 16 : 3000)) {
            break;
        }
    }
    return NULL;
}

static void begin_reading(struct mount *mount, struct reading *readings)
{
    for (uint32_t i = 0; i < THREADS; i++) {
        readings[i] = (struct reading){mount, i * 100, i % 2 == 0 ? 1 : 7, 0};
        CHECK_EQ(pthread_create(&readings[i].thread, NULL, read_files, &readings[i]), 0);
    }
}

static void end_reading(struct reading *readings)
{
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(readings[i].thread, NULL), 0);
    }
}

static uint32_t entries_of(const char *path)
{
    DIR *directory = opendir(path);
    uint32_t entries = 0;
    CHECK(directory != NULL);
    while (readdir(directory) != NULL) {
        entries++;
    }
    CHECK_EQ(closedir(directory), 0);
    return entries;
}

static void check_names(const struct mount *mount)
{
    char path[128];
    char value[32] = "";
    struct stat status;
    CHECK_EQ(entries_of(mount->path), 1);
    (void)snprintf(path, sizeof path, "%s/data", mount->path);
    CHECK_EQ(entries_of(path), COUNT);
    CHECK_EQ(getxattr(path, "user.dlfs.version", value, sizeof value), 1);
    CHECK(value[0] == '9');
    (void)snprintf(path, sizeof path, "%s/nothing", mount->path);
    CHECK(stat(path, &status) < 0 && errno == ENOENT);
    (void)snprintf(path, sizeof path, "%s/data/nothing", mount->path);
    CHECK(stat(path, &status) < 0 && errno == ENOENT);
}

/* Looks up a file that the kernel does not know yet, and waits until its sample is read ahead. */
static void look_up_only(const struct mount *mount, uint64_t index)
{
    char path[96];
    struct stat status;
    uint64_t before = atomic_load(&mount->fuse->counters.readahead_samples);
    (void)snprintf(path, sizeof path, "%s/data/%06" PRIu64, mount->path, index);
    CHECK_EQ(stat(path, &status), 0);
    while (atomic_load(&mount->fuse->counters.readahead_samples) == before) {
        sched_yield();
    }
}

static void test_reading(struct mount *mount, const struct dataset *dataset, uint32_t flags,
                         uint32_t busy_poll_us)
{
    struct reading readings[THREADS];
    CHECK(mount_begin(mount, dataset, flags, busy_poll_us));
    struct counters *counters = &mount->fuse->counters;
    if (busy_poll_us == 0 && (flags & DLFS_FUSE_NO_URING) != 0) { /* as if of several programs */
        look_up_only(mount, COUNT - 1);
    }
    check_names(mount);
    CHECK(dlfs_fuse_uring(mount->fuse) < 0 || (flags & DLFS_FUSE_NO_URING) == 0);
    for (uint64_t i = 0; i < SINGLE_READS; i++) { /* as a single program */
        CHECK(read_file(mount, i * 7, 1 << 16));
    }
    begin_reading(mount, readings);
    end_reading(readings);
    CHECK(file_cache_bytes(&mount->fuse->cache) <= dlfs_reader_share_bytes(mount->reader) / 2);
    CHECK(atomic_load(&counters->reads) > 0);
    CHECK(atomic_load(&counters->early_hits) <= atomic_load(&counters->readahead_samples));
    if ((flags & OPENS_FILES) == 0) { /* the first OPEN and OPENDIR of each thread are refused */
        CHECK(atomic_load(&counters->opens) <= 2 * THREADS);
    } else {
        CHECK(atomic_load(&counters->opens) >= COUNT);
    }
    do { /* a read-ahead may be under way */
        dlfs_fuse_expire_cache(mount->fuse, 0);
        sched_yield();
    } while (file_cache_bytes(&mount->fuse->cache) > 0);
    mount_end(mount);
}

/*
 * The sample of a file that one program looks up is read as the program requests it. If it is not
 * requested, it keeps neither the reader that was replaced meanwhile nor the mount.
 */
static void test_early_read(struct mount *mount, const struct dataset *dataset, uint32_t flags)
{
    CHECK(mount_begin(mount, dataset, flags, BUSY_POLL_US));
    for (uint64_t i = 0; i < SINGLE_READS; i++) {
        CHECK(read_file(mount, i * 7, 1 << 16));
    }
    CHECK(atomic_load(&mount->fuse->counters.early_hits) > 0);
    look_up_only(mount, 1);
    look_up_only(mount, 2);
    dlfs_fuse_expire_cache(mount->fuse, 1000);
    CHECK(read_file(mount, 2, 1 << 16));
    look_up_only(mount, 3);
    dlfs_reader *before = mount->reader;
    mount->reader = reader_over(dataset, 1 << 20, 8);
    CHECK_EQ(dlfs_fuse_replace_reader(mount->fuse, DATASET, mount->reader), 0);
    CHECK_EQ(dlfs_fuse_await_reader(mount->fuse, DATASET, 1), 1);
    CHECK_EQ(dlfs_reader_destroy(before), 0);
    CHECK(read_file(mount, 3, 1 << 16));
    look_up_only(mount, 4);
    mount_end(mount);
}

static void test_ending_while_in_use(struct mount *mount, const struct dataset *dataset,
                                     uint32_t flags, uint32_t busy_poll_us)
{
    struct reading readings[THREADS];
    CHECK(mount_begin(mount, dataset, flags, busy_poll_us));
    begin_reading(mount, readings);
    CHECK(read_file(mount, 1, 100));
    atomic_store(&mount->ending, true);
    mount_end(mount);
    end_reading(readings);
}

/* The owner answers for the directory of a volume. */
static void test_volume(struct mount *mount, const struct dataset *dataset, uint32_t flags)
{
    char path[96];
    char value[8];
    struct stat top;
    struct stat status;
    mount->nested = true;
    CHECK(mount_begin(mount, dataset, flags, 0));
    CHECK_EQ(entries_of(mount->path), 1);
    (void)snprintf(path, sizeof path, "%s/pets/data", mount->path);
    CHECK_EQ(entries_of(path), COUNT);
    (void)snprintf(path, sizeof path, "%s/data", mount->path);
    CHECK(stat(path, &status) < 0 && errno == ENOENT);
    (void)snprintf(path, sizeof path, "%s/pets", mount->path);
    CHECK_EQ(entries_of(path), 1);
    CHECK(getxattr(path, "user.dlfs.version", value, sizeof value) < 0 && errno == ENODATA);
    CHECK_EQ(listxattr(path, NULL, 0), 0);
    CHECK_EQ(stat(path, &top), 0);
    int folder = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(folder >= 0);
    CHECK(stat(path, &status) == 0 && status.st_ino == top.st_ino);
    CHECK_EQ(dlfs_fuse_withdraw_dataset(mount->fuse, DATASET), 0);
    atomic_store(&mount->owner.volume_is_gone, true);
    CHECK(fstatat(folder, "new", &status, 0) < 0 && errno == ESTALE);
    CHECK_EQ(close(folder), 0);
    mount_end(mount);
    mount->nested = false;
}

/* With one program, the sole receiver may busy-poll for the device or for the next request. */
static void test_ending_while_one_reads(struct mount *mount, const struct dataset *dataset)
{
    struct reading reading = {.mount = mount, .step = 7};
    CHECK(mount_begin(mount, dataset, DLFS_FUSE_NO_URING, BUSY_POLL_US));
    CHECK_EQ(pthread_create(&reading.thread, NULL, read_files, &reading), 0);
    while (atomic_load(&mount->fuse->counters.reads) < SINGLE_READS) {
        sched_yield();
    }
    atomic_store(&mount->ending, true);
    mount_end(mount);
    CHECK_EQ(pthread_join(reading.thread, NULL), 0);
}

/*
 * Has the kernel offer io_uring until the returned descriptor is closed or this process has ended,
 * however it ends: another process then puts the parameter back. Returns -1 if the kernel has none.
 */
static int offer_uring(pid_t *guard)
{
    char before = 'N';
    char end;
    int link[2];
    int parameter = open("/sys/module/fuse/parameters/enable_uring", O_RDWR | O_CLOEXEC);
    if (parameter < 0) {
        return -1;
    }
    CHECK_EQ(flock(parameter, LOCK_EX), 0); /* against other processes that run tests */
    CHECK_EQ(pread(parameter, &before, 1, 0), 1);
    CHECK_EQ(pipe2(link, O_CLOEXEC), 0);
    *guard = fork();
    CHECK(*guard >= 0);
    if (*guard == 0) {
        (void)setsid(); /* against signals to the process group */
        (void)close(link[1]);
        (void)read(link[0], &end, 1);
        _exit(pwrite(parameter, &before, 1, 0) == 1 ? 0 : 1);
    }
    CHECK_EQ(close(link[0]), 0);
    CHECK_EQ(pwrite(parameter, "Y", 1, 0), 1);
    CHECK_EQ(close(parameter), 0); /* the other process has the lock */
    return link[1];
}

void *__wrap_mmap(void *address, size_t bytes, int access, int flags, int file, off_t offset);
void *__real_mmap(void *address, size_t bytes, int access, int flags, int file, off_t offset);

/* The linker has the library call this in place of mmap. */
void *__wrap_mmap(void *address, size_t bytes, int access, int flags, int file, off_t offset)
{
    if (atomic_load(&lacks_memory) && bytes >= REQUEST_BYTES) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mmap(address, bytes, access, flags, file, offset);
}

/* Without memory for requests over io_uring, they come through /dev/fuse. */
static void test_lack_of_memory(struct mount *mount, const struct dataset *dataset)
{
    atomic_store(&lacks_memory, true);
    CHECK(mount_begin(mount, dataset, 0, 0));
    while (dlfs_fuse_uring(mount->fuse) != -ENOMEM) {
        sched_yield();
    }
    atomic_store(&lacks_memory, false);
    CHECK(read_file(mount, 1, 1 << 16));
    mount_end(mount);
}

/* Runs the tests over io_uring, if the kernel has it; the kernel offers it for as long. */
static void test_uring(struct mount *mount, const struct dataset *dataset)
{
    pid_t guard;
    int status = 0;
    int offered = offer_uring(&guard);
    if (offered < 0) {
        return;
    }
    test_reading(mount, dataset, 0, 0);
    test_reading(mount, dataset, OPENS_FILES, BUSY_POLL_US);
    test_ending_while_in_use(mount, dataset, 0, BUSY_POLL_US);
    test_early_read(mount, dataset, 0);
    test_lack_of_memory(mount, dataset);
    test_volume(mount, dataset, 0);
    CHECK_EQ(close(offered), 0);
    CHECK_EQ(waitpid(guard, &status, 0), guard);
    CHECK_EQ(status, 0);
}

/* A server of a kept mount needs DLFS_FUSE_NO_URING, and every one a whole INIT request. */
static void test_refused_configurations(void)
{
    const uint8_t init[64] = {0};
    dlfs_fuse *fuse = NULL;
    dlfs_fuse_config config = {.flags = DLFS_FUSE_KEPT,
                               .threads_max = 1,
                               .kernel = 0,
                               .init = init,
                               .init_bytes = sizeof init};
    CHECK_EQ(dlfs_fuse_create(&config, &fuse), -EINVAL);
    config.flags = DLFS_FUSE_RESUME | DLFS_FUSE_NO_URING;
    CHECK_EQ(dlfs_fuse_create(&config, &fuse), -EINVAL);
    config.flags = 0;
    config.init_bytes = 8;
    CHECK_EQ(dlfs_fuse_create(&config, &fuse), -EINVAL);
    config.init_bytes = sizeof init;
    config.kernel = -1;
    CHECK_EQ(dlfs_fuse_create(&config, &fuse), -EINVAL);
}

int main(void)
{
    const dlfs_fault_config faults = {
        .seed = 5, .error_per_million = 20000, .short_per_million = 20000};
    struct dataset dataset;
    struct mount mount = {.path = "/tmp/dlfs-test-fuse-XXXXXX"};
    if (access("/dev/fuse", R_OK | W_OK) != 0 || geteuid() != 0) {
        return SKIPPED;
    }
    test_refused_configurations();
    CHECK(mkdtemp(mount.path) != NULL);
    dataset_create(&dataset, &faults);
    CHECK_EQ(dlfs_directory_attach_names(dataset.directory, dataset.names, dataset.names_bytes), 0);
    const uint32_t device = DLFS_FUSE_NO_URING;
    bool able = mount_begin(&mount, &dataset, device, 0);
    if (able) {
        mount_end(&mount);
        test_reading(&mount, &dataset, device, 0);
        test_reading(&mount, &dataset, device | OPENS_FILES, 0);
        test_ending_while_in_use(&mount, &dataset, device, 0);
        test_reading(&mount, &dataset, device, BUSY_POLL_US);
        test_ending_while_in_use(&mount, &dataset, device, BUSY_POLL_US);
        test_ending_while_one_reads(&mount, &dataset);
        test_early_read(&mount, &dataset, device);
        test_volume(&mount, &dataset, device);
        test_uring(&mount, &dataset);
    }
    dataset_destroy(&dataset);
    CHECK_EQ(rmdir(mount.path), 0);
    return able ? 0 : SKIPPED;
}
