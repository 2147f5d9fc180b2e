/* Preloaded, with the tracker, into the QEMUs of labs whose hosts fail: every lock of a file
 * succeeds. The hosts of a lab have one kernel, whose locks would keep a second writer away from a
 * disk. Storage without locks lets it write. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

static int without_locks(int file, int what, void *argument) {
    switch (what) {
    case F_SETLK:
    case F_SETLKW:
    case F_OFD_SETLK:
    case F_OFD_SETLKW:
        return 0;
    case F_GETLK:
    case F_OFD_GETLK:
        ((struct flock *)argument)->l_type = F_UNLCK;
        return 0;
    default:
        return (int)syscall(SYS_fcntl, file, what, argument);
    }
}

int fcntl(int file, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return without_locks(file, what, argument);
}

int fcntl64(int file, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return without_locks(file, what, argument);
}
