/* A library to preload. It delays file-system calls on an output by 0.3 to 50 ms, as a network file
 * system does. If HOSTILE_LOCKS is set, every lock succeeds, as on a file system without shared locks.
 * scripts/outputs/hostile_outputs.py builds and preloads it.
 *
 * Delays are random, before and after a call, if the path contains "OUT". HOSTILE_SEED is the seed. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

static _Atomic uint64_t state;

__attribute__((constructor)) static void seed(void) {
    const char *text = getenv("HOSTILE_SEED");
    state = (text ? strtoull(text, 0, 10) : 1) * 0x9E3779B97F4A7C15u;
}

/* splitmix64. */
static uint64_t draw(void) {
    uint64_t z = atomic_fetch_add(&state, 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Delays one call in four by 0.3 to 50 ms. Short delays are more likely, to interleave several processes. */
static void delay(const char *path) {
    if (!path || !strstr(path, "OUT") || draw() % 4)
        return;
    double milliseconds = 0.3 * pow(50 / 0.3, (double)(draw() >> 11) / (double)(1ull << 53));
    struct timespec time = {0, (long)(milliseconds * 1e6)};
    nanosleep(&time, 0);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define DELAYED(type, name, path, parameters, arguments) \
    type name parameters {                               \
        delay(path);                                     \
        type result = NEXT(name) arguments;              \
        delay(path);                                     \
        return result;                                   \
    }

DELAYED(int, mkdir, path, (const char *path, mode_t mode), (path, mode))
DELAYED(int, rmdir, path, (const char *path), (path))
DELAYED(int, unlink, path, (const char *path), (path))
DELAYED(int, unlinkat, "OUT", (int at, const char *path, int flags), (at, path, flags))
DELAYED(int, rename, to, (const char *from, const char *to), (from, to))
DELAYED(int, link, to, (const char *from, const char *to), (from, to))
DELAYED(int, linkat, to, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))
DELAYED(int, stat64, path, (const char *path, struct stat64 *found), (path, found))
DELAYED(int, lstat64, path, (const char *path, struct stat64 *found), (path, found))
DELAYED(int, statx, path, (int at, const char *path, int flags, unsigned mask, struct statx *found),
        (at, path, flags, mask, found))
DELAYED(char *, realpath, path, (const char *path, char *real), (path, real))
DELAYED(DIR *, opendir, path, (const char *path), (path))

#define DELAYED_OPEN(name, parameters, arguments) \
    int name parameters {                         \
        va_list more;                             \
        va_start(more, flags);                    \
        mode_t mode = va_arg(more, mode_t);       \
        va_end(more);                             \
        delay(path);                              \
        int result = NEXT(name) arguments;        \
        delay(path);                              \
        return result;                            \
    }

DELAYED_OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
DELAYED_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
DELAYED_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
DELAYED_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

int flock(int file, int operation) {
    return getenv("HOSTILE_LOCKS") ? 0 : NEXT(flock)(file, operation);
}

int fcntl64(int file, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    return locks && getenv("HOSTILE_LOCKS") ? 0 : NEXT(fcntl64)(file, command, argument);
}
