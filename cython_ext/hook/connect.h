/* The socket calls of broker_rpc.pyx: macros over macros, which Cython cannot spell. Every wait is bounded. */
#ifndef VGPU_CONNECT_H
#define VGPU_CONNECT_H
#include "hook/hook_native.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#define VGPU_PATIENCE_S 10

/* Whether this process is in the machine's own user namespace: only there uid 65534 is a user like others. */
static inline int vgpu_sees_all_uids(void) {
    static const char whole[] = "0 0 4294967295 ";
    char text[64], *end;
    const char *expected = whole;
    int fd = open("/proc/self/uid_map", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text);
    if (fd < 0) return 1;
    close(fd);
    end = text + (n > 0 ? n : 0);
    for (char *at = text; at < end; at++) {
        int space = *at == ' ' || *at == '\n' || *at == '\t';
        if (space && (expected == whole || expected[-1] == ' ')) continue;
        if (*expected != (space ? ' ' : *at)) return 0;
        expected++;
    }
    return !*expected;
}

/* Root, or this user. In a user namespace a uid of outside shows as 65534, and may be root's. */
static inline int vgpu_trusts(unsigned uid) {
    return uid == 0 || uid == getuid() || uid == geteuid() || (uid == 65534 && !vgpu_sees_all_uids());
}

/* Whether another user could have put something else at `path`: a directory on the way is theirs, or all may write there.
 * A part that does not exist is no danger, as then nothing listens below it. */
static inline int vgpu_could_be_replaced(const char *path) {
    char part[256];
    size_t size = strlen(path);
    if (size >= sizeof part) return 1;
    for (size_t i = 1; i <= size; i++) {
        struct stat found;
        if (i < size && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (syscall(SYS_newfstatat, AT_FDCWD, part, &found, AT_SYMLINK_NOFOLLOW)) return 0;
        if (!vgpu_trusts(found.st_uid)) return 1;
        if (S_ISDIR(found.st_mode) && found.st_mode & S_IWOTH && !(found.st_mode & S_ISVTX)) return 1;
    }
    return 0;
}

/* Whether the hook may trust the process that listens at the other end. */
static inline int vgpu_trusts_peer(int fd) {
    struct ucred peer = {0, (uid_t)-1, (gid_t)-1};
    socklen_t size = sizeof peer;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && vgpu_trusts(peer.uid);
}

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

/* Whether a process listens at `path`; also where only another user's may connect. */
static inline int vgpu_listens(const char *path) {
    int fd = vgpu_connect(path);
    if (fd >= 0) close(fd);
    return fd >= 0 || (fd != -ENOENT && fd != -ENOTDIR && fd != -ECONNREFUSED);
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
static inline long vgpu_link(const char *path, char *out, size_t capacity) { return (long)readlink(path, out, capacity); }
/* Those on which this process may run; by its number, since the C library's function came with newer versions. */
static inline long vgpu_cores(void) {
    unsigned long set[128] = {0};
    long bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set), cores = 0;
    for (long i = 0; i * (long)sizeof *set < bytes; i++) cores += __builtin_popcountl(set[i]);
    return cores > 0 ? cores : sysconf(_SC_NPROCESSORS_ONLN);
}
/* Whether the directory is there; one that was removed, but is mounted in this container, is not. */
static inline int vgpu_is_kept(const char *directory) {
    struct stat found;
    return !syscall(SYS_newfstatat, AT_FDCWD, directory, &found, 0) && found.st_nlink > 0;
}
static inline int vgpu_exists(const char *path) { return access(path, F_OK) == 0; }
/* What the file begins with; the number of bytes, or -1. */
static inline long vgpu_read(const char *path, char *out, size_t capacity) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, capacity);
    if (fd >= 0) close(fd);
    return (long)n;
}

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
