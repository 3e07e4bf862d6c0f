/* A disk that fails or is watched, for LD_PRELOAD. Only calls on paths that contain $DISK_UNDER are concerned.

   $DISK_LOG: appends a line for each change, in the order in which they happen:
       create INODE PATH | mkdir PATH | sync INODE SIZE PATH | syncdir PATH | rename PATH PATH | remove PATH
     A hard link to each new file is made as $DISK_STORE/INODE: it keeps the content, and keeps the inode's number in use.
   $DISK_FAIL=N: the N-th read (from 1; opening, listing, reading or asking for the state of a file) fails with $DISK_ERROR (a number).
     With $DISK_FAIL=-N all reads from the N-th on fail. $DISK_COUNT: a file that is one byte longer for each read.
   $DISK_REFUSE: while a file of this name exists, no folder can be made; the error is $DISK_ERROR. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long reads;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int concerned(const char *path) {
    const char *under = getenv("DISK_UNDER");
    return under && path && strstr(path, under) != NULL;
}

/* The path of a descriptor, or of a path relative to one. */
static const char *full(int folder, const char *path, char *space) {
    if (path && (path[0] == '/' || folder == AT_FDCWD)) return path;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t n = readlink(link, space, PATH_MAX - 1);
    if (n < 0) return NULL;
    space[n] = 0;
    if (path) snprintf(space + n, PATH_MAX - n, "/%s", path);
    return space;
}

/* Whether this read must fail; sets errno. */
static int fails(const char *path) {
    const char *fail = getenv("DISK_FAIL");
    if (!fail || !concerned(path)) return 0;
    long wanted = atol(fail), number = __sync_add_and_fetch(&reads, 1);
    const char *count = getenv("DISK_COUNT");
    if (count) {
        int file = open(count, O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (file >= 0) {
            if (write(file, "x", 1) < 0) abort();
            close(file);
        }
    }
    if (number == wanted || (wanted < 0 && number >= -wanted)) {
        errno = atoi(getenv("DISK_ERROR"));
        return 1;
    }
    return 0;
}

static void note(const char *format, ...) {
    const char *log = getenv("DISK_LOG");
    char line[3 * PATH_MAX];
    va_list values;
    va_start(values, format);
    int n = vsnprintf(line, sizeof line, format, values), old = errno;
    va_end(values);
    int file = open(log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file < 0 || write(file, line, n) != n) abort();
    close(file);
    errno = old;
}

static int logged(const char *path) { return getenv("DISK_LOG") && concerned(path); }

static void created(int file, const char *path) {
    struct stat state;
    char from[64], to[PATH_MAX];
    fstat(file, &state);
    snprintf(from, sizeof from, "/proc/self/fd/%d", file);
    snprintf(to, sizeof to, "%s/%lu", getenv("DISK_STORE"), (unsigned long)state.st_ino);
    if (linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) == 0) note("create %lu %s\n", (unsigned long)state.st_ino, path);
}

static int opened(int (*real)(int, const char *, int, ...), int folder, const char *path, int flags, mode_t mode) {
    char space[PATH_MAX];
    const char *whole = full(folder, path, space);
    if ((flags & O_ACCMODE) == O_RDONLY && fails(whole)) return -1;
    if (!(flags & O_CREAT) || !logged(whole)) return real(folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    int file = real(folder, path, flags, mode);
    if (file >= 0) created(file, whole);
    pthread_mutex_unlock(&lock);
    return file;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list values; \
        va_start(values, flags); \
        mode = va_arg(values, mode_t); \
        va_end(values); \
    }

int openat(int folder, const char *path, int flags, ...) { MODE REAL(openat); return opened(real, folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE REAL(openat64); return opened(real, folder, path, flags, mode); }
int open(const char *path, int flags, ...) { MODE REAL(openat); return opened(real, AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(openat64); return opened(real, AT_FDCWD, path, flags, mode); }

static int failing(int file) {
    char space[PATH_MAX];
    return getenv("DISK_FAIL") && fails(full(file, NULL, space));
}

ssize_t read(int file, void *to, size_t size) { REAL(read); return failing(file) ? -1 : real(file, to, size); }
ssize_t pread(int file, void *to, size_t size, off_t at) { REAL(pread); return failing(file) ? -1 : real(file, to, size, at); }
ssize_t pread64(int file, void *to, size_t size, off64_t at) { REAL(pread64); return failing(file) ? -1 : real(file, to, size, at); }
ssize_t preadv(int file, const struct iovec *to, int n, off_t at) { REAL(preadv); return failing(file) ? -1 : real(file, to, n, at); }
DIR *opendir(const char *path) { REAL(opendir); return fails(path) ? NULL : real(path); }
int stat(const char *path, struct stat *to) { REAL(stat); return fails(path) ? -1 : real(path, to); }
int lstat(const char *path, struct stat *to) { REAL(lstat); return fails(path) ? -1 : real(path, to); }
int stat64(const char *path, struct stat64 *to) { REAL(stat64); return fails(path) ? -1 : real(path, to); }
int lstat64(const char *path, struct stat64 *to) { REAL(lstat64); return fails(path) ? -1 : real(path, to); }

static int synced(int (*real)(int), int file) {
    char space[PATH_MAX];
    const char *path = full(file, NULL, space);
    struct stat state;
    if (!logged(path)) return real(file);
    pthread_mutex_lock(&lock);
    fstat(file, &state);
    if (S_ISDIR(state.st_mode)) note("syncdir %s\n", path);
    else note("sync %lu %ld %s\n", (unsigned long)state.st_ino, (long)state.st_size, path);
    pthread_mutex_unlock(&lock);
    return real(file);
}

int fsync(int file) { REAL(fsync); return synced(real, file); }
int fdatasync(int file) { REAL(fdatasync); return synced(real, file); }

#define LOGGED(path, call, ...) \
    if (!logged(path)) return call; \
    pthread_mutex_lock(&lock); \
    int result = call; \
    if (result == 0) note(__VA_ARGS__); \
    pthread_mutex_unlock(&lock); \
    return result

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    char space[PATH_MAX];
    const char *whole = full(folder, path, space), *refuse = getenv("DISK_REFUSE");
    if (refuse && concerned(whole) && access(refuse, F_OK) == 0) {
        errno = atoi(getenv("DISK_ERROR"));
        return -1;
    }
    LOGGED(whole, real(folder, path, mode), "mkdir %s\n", whole);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    char one[PATH_MAX], two[PATH_MAX];
    const char *first = full(from_folder, from, one), *second = full(to_folder, to, two);
    LOGGED(first, real(from_folder, from, to_folder, to), "rename %s\t%s\n", first, second);
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    (void)flags;
    return renameat(from_folder, from, to_folder, to);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    char space[PATH_MAX];
    const char *whole = full(folder, path, space);
    LOGGED(whole, real(folder, path, flags), "remove %s\n", whole);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
