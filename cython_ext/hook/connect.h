/* The socket calls of conversation.pyx: macros over macros, which Cython cannot spell. Every wait is bounded. */
#ifndef VGPU_CONNECT_H
#define VGPU_CONNECT_H
#include "hook/hook_native.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#define VGPU_PATIENCE_S 10

static inline int vgpu_connect(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = VGPU_PATIENCE_S};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), failed;
    if (fd < 0) return -errno;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    do failed = connect(fd, (struct sockaddr *)&address, sizeof address);
    while (failed && errno == EINTR);
    if (failed) {
        failed = errno;
        close(fd);
        return -failed;
    }
    return fd;
}

/* Sends one frame, receives one; the descriptors come with its first byte. `*fd_count`: room, then how many came. */
static inline long vgpu_exchange(int fd, const uint8_t *request, size_t size, uint8_t *reply, size_t capacity, int *fds, int *fd_count) {
    union {
        char bytes[CMSG_SPACE(8 * sizeof(int))];
        struct cmsghdr aligned;
    } control;
    size_t done = 0, room = (size_t)*fd_count;
    *fd_count = 0;
    while (done < size) {
        ssize_t n = send(fd, request + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -errno;
        done += (size_t)n;
    }
    for (done = 0;;) {
        struct iovec part = {reply + done, capacity - done};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            size_t sent = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < sent; i++) {
                int received;
                memcpy(&received, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
                if ((size_t)*fd_count < room) fds[(*fd_count)++] = received;
                else close(received);
            }
        }
        if (message.msg_flags & MSG_CTRUNC) return -EMFILE; /* pages were sent that found no free descriptor here */
        if (n == 0) return done ? (long)done : -ECONNRESET;
        done += (size_t)n;
        if (done >= 4) {
            size_t whole = 4 + (reply[0] | (size_t)reply[1] << 8 | (size_t)reply[2] << 16 | (size_t)reply[3] << 24);
            if (done >= whole || whole > capacity) return (long)done;
        }
        if (done == capacity) return (long)done;
    }
}

static inline long vgpu_file_size(int fd) { return (long)lseek(fd, 0, SEEK_END); }
static inline uint64_t vgpu_file_number(int fd) {
    struct stat found; /* by its number: the function has another version in every other glibc */
    return syscall(SYS_fstat, fd, &found) ? 0 : (uint64_t)found.st_ino;
}
static inline int vgpu_uid(void) { return (int)getuid(); }
static inline long vgpu_cores(void) { return sysconf(_SC_NPROCESSORS_ONLN); }
static inline int vgpu_exists(const char *path) { return access(path, F_OK) == 0; }

/* The program's name as `ps` would show it, for the books only. */
static inline void vgpu_command(char *out, size_t capacity) {
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, out, capacity - 1);
    if (fd >= 0) close(fd);
    if (n < 0) n = 0;
    out[n] = 0;
    for (ssize_t i = 0; i < n; i++) /* msgpack strings are UTF-8; a name need not be */
        if ((signed char)out[i] < 0) out[i] = '?';
}
#endif
