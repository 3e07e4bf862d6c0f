/* Makes writes fail, for a library that is loaded before libc (LD_PRELOAD). It reads its orders from the environment at each write:

   FAIL_AT     a part of the file's path, fd:N, or `records` for all that a run writes about itself
   FAIL_FIRST, FAIL_LAST   the first and the last write to fail, counted from 1 among the writes to such files
   FAIL_ERRNO  the error

   Half of the data of a failing write is written, as on a disk that fills up in the middle of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int is_meant(int fd, const char *at) {
    char link[64], path[4096];
    if (strncmp(at, "fd:", 3) == 0) return fd == atoi(at + 3);
    if (strcmp(at, "records") == 0)
        return fd == 1 || is_meant(fd, "metrics.jsonl") || is_meant(fd, "events.jsonl") || is_meant(fd, "tensorboard/");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, at) != NULL;
}

ssize_t write(int fd, const void *data, size_t count) {
    static ssize_t (*plain)(int, const void *, size_t);
    static long calls;
    if (!plain) plain = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    const char *at = getenv("FAIL_AT");
    if (at && is_meant(fd, at)) {
        long call = __sync_add_and_fetch(&calls, 1);
        if (call >= number("FAIL_FIRST", 1) && call <= number("FAIL_LAST", 1L << 60)) {
            if (count > 1 && plain(fd, data, count / 2) < 0) return -1;
            errno = (int)number("FAIL_ERRNO", ENOSPC);
            return -1;
        }
    }
    return plain(fd, data, count);
}
