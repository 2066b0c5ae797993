/* What the programs of this folder share. */
#ifndef SETUP_H
#define SETUP_H

#include <infiniband/verbs.h>

/* Says what failed, with errno, and ends the program. */
void fail(const char *what) __attribute__((noreturn));

/* Resident memory of this process in KiB. */
long resident_kib(void);

/* Of the monotonic clock. */
double now_seconds(void);

/* User and system time of this process. */
double cpu_seconds(void);

/* The first device. */
struct ibv_context *open_device(void);

enum { DEPTH = 16 };

/* An RC queue pair with DEPTH requests in each direction; both queues complete in `cq`. */
struct ibv_qp *create_rc(struct ibv_pd *pd, struct ibv_cq *cq);

/* Takes an RC queue pair to RTS, connected to one of the port with GID `gid`. PSNs begin at 0. */
void connect_rc(struct ibv_qp *qp, uint32_t peer, const union ibv_gid *gid);

/* Takes `wanted` completions, which must be successes. */
void complete(struct ibv_cq *cq, long wanted);

#endif
