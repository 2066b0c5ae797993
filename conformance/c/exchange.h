/* What the parts of `exchange` share. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "waited.h"

enum { WRONG = 1, UNREACHABLE = 3, LATE = 4, PEER_GONE = 6 };
enum { MAX_QPS = 16, MAX_DEPTH = 16, RECEIVES = 64, SOURCE = 1 << 18 };

struct options {
	const char *type, *ops, *host;
	int port, qps, count, depth, size, timeout, retries, mtu, gid, seed, srq, events, endless, whole;
};
extern struct options opt;

/* What the other must know. */
struct introduction {
	union ibv_gid gid;
	uint32_t qpn[MAX_QPS], srqn, rkey;
	uint64_t addr;
};

struct side {
	int tcp;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_xrcd *xrcd;
	/* One sends, the other receives: the same, but for XRC. */
	struct ibv_qp *qp[MAX_QPS], *target[MAX_QPS];
	struct ibv_ah *ah;
	struct ibv_mr *mr;
	struct introduction mine, theirs;
	/* All registered memory; see memory.c's layout. */
	char *memory;
};

/* Where things lie in a side's memory: the first four are the other's to use. */
size_t at_source(void);
size_t at_words(int qp);
size_t at_slot(int qp, int slot);
size_t at_message(unsigned int number);
size_t at_local(int qp, int slot);
size_t at_receive(int number);
size_t memory_len(void);

void open_side(struct side *side, int tcp);
void post_receive(struct side *side, int number);
/* Polls, or sleeps up to 10 ms for events. */
int poll_side(struct side *side, struct ibv_wc *wcs, int most);
void exchange_reliable(struct side *side);
void exchange_unreliable(struct side *side);

void die(int status, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
double now(void);
uint64_t mix(uint64_t z);
void pattern(char *to, size_t len, uint64_t key);
void swap_over_tcp(int fd, void *mine, void *theirs, size_t len);

#endif
