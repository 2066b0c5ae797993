/* What the tests share: assertions that name the line, and a pair of connected queue pairs in one process. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline void fail_at(const char *file, int line, const char *what, long got, long want)
{
	fprintf(stderr, "%s:%d: %s: got %ld, want %ld\n", file, line, what, got, want);
	exit(1);
}

#define EQ(got, want)                                                              \
	do {                                                                       \
		long g_ = (long)(got), w_ = (long)(want);                          \
		if (g_ != w_)                                                      \
			fail_at(__FILE__, __LINE__, #got, g_, w_);                 \
	} while (0)
#define OK(call) EQ(call, 0)
#define TRUE(cond) EQ(!!(cond), 1)

/* The call returns this errno value, and sets errno as well (S1.8). */
#define REFUSES(call, error)                                                       \
	do {                                                                       \
		errno = 0;                                                         \
		EQ(call, error);                                                   \
		EQ(errno, error);                                                  \
	} while (0)
/* The call returns NULL and sets errno (S2.6). */
#define IS_NULL(call, error)                                                       \
	do {                                                                       \
		errno = 0;                                                         \
		TRUE((call) == NULL);                                              \
		EQ(errno, error);                                                  \
	} while (0)
/* The call returns -1 and sets errno. */
#define MINUS_ONE(call, error)                                                     \
	do {                                                                       \
		errno = 0;                                                         \
		EQ(call, -1);                                                      \
		EQ(errno, error);                                                  \
	} while (0)

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buf;
};

static const size_t BUF = 65536;

static inline struct ibv_context *open_device(void)
{
	int n = -1;
	struct ibv_device **list = ibv_get_device_list(&n);
	TRUE(list != NULL);
	TRUE(n >= 1 && list[0] && !list[n]);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	TRUE(ctx != NULL);
	ibv_free_device_list(list);
	return ctx;
}

static inline struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq, enum ibv_qp_type type,
				     struct ibv_srq *srq, int sq_sig_all)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.qp_type = type,
		.sq_sig_all = sq_sig_all,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	TRUE(qp != NULL);
	return qp;
}

static inline void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	mask |= qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	OK(ibv_modify_qp(qp, &a, mask));
}

static inline union ibv_gid own_gid(struct ibv_context *ctx)
{
	union ibv_gid gid;
	OK(ibv_query_gid(ctx, 1, 0, &gid));
	return gid;
}

static inline void to_rtr(struct ibv_qp *qp, uint32_t dest)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = dest,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 1 };
	int mask = IBV_QP_STATE;
	if (qp->qp_type != IBV_QPT_UD) {
		a.ah_attr.is_global = 1;
		a.ah_attr.grh.dgid = own_gid(qp->context);
		a.ah_attr.grh.hop_limit = 64;
		a.ah_attr.port_num = 1;
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	OK(ibv_modify_qp(qp, &a, mask));
}

static inline void to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	OK(ibv_modify_qp(qp, &a, mask));
}

static inline void to_err(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
}

static inline struct end make_end(struct ibv_pd *pd, enum ibv_qp_type type)
{
	struct end e;
	e.cq = ibv_create_cq(pd->context, 32, NULL, NULL, 0);
	TRUE(e.cq != NULL);
	e.qp = make_qp(pd, e.cq, type, NULL, 0);
	e.buf = calloc(1, BUF);
	e.mr = ibv_reg_mr(pd, e.buf, BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
						   IBV_ACCESS_REMOTE_ATOMIC);
	TRUE(e.mr != NULL);
	return e;
}

static inline void connect_ends(struct end *a, struct end *b)
{
	to_init(a->qp), to_init(b->qp);
	to_rtr(a->qp, b->qp->qp_num), to_rtr(b->qp, a->qp->qp_num);
	to_rts(a->qp), to_rts(b->qp);
}

static inline void free_end(struct end *e)
{
	OK(ibv_destroy_qp(e->qp));
	OK(ibv_dereg_mr(e->mr));
	OK(ibv_destroy_cq(e->cq));
	free(e->buf);
}

static inline double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Polls until there is one. */
static inline struct ibv_wc poll_one(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	double until = now() + 10;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		TRUE(now() < until);
	EQ(n, 1);
	return wc;
}

static inline int post_recv(struct end *e, uint64_t id, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = len, .lkey = e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	int ret = ibv_post_recv(e->qp, &wr, &bad);
	TRUE(ret == 0 || bad == &wr);
	return ret;
}

static inline int post_send(struct end *e, uint64_t id, uint32_t len, unsigned int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = len, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags };
	struct ibv_send_wr *bad = NULL;
	int ret = ibv_post_send(e->qp, &wr, &bad);
	TRUE(ret == 0 || bad == &wr);
	return ret;
}

#endif
