/* Extended reliable connections: domains, SRQs and queue pairs of XRC, what is refused, who is busy, who gets events. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

static struct ibv_xrcd *try_xrcd(struct ibv_context *ctx, int fd, int oflags)
{
	struct ibv_xrcd_init_attr a = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = fd, .oflags = oflags };
	return ibv_open_xrcd(ctx, &a);
}

static struct ibv_xrcd *make_xrcd(struct ibv_context *ctx)
{
	struct ibv_xrcd *xrcd = try_xrcd(ctx, -1, O_CREAT);
	TRUE(xrcd != NULL && xrcd->context == ctx);
	return xrcd;
}

static struct ibv_srq_init_attr_ex srq_attr(struct ibv_pd *pd, struct ibv_xrcd *xrcd, struct ibv_cq *cq)
{
	return (struct ibv_srq_init_attr_ex){ .attr = { .max_wr = 8, .max_sge = 2 }, .srq_type = IBV_SRQT_XRC,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.pd = pd, .xrcd = xrcd, .cq = cq };
}

static struct ibv_srq *make_srq(struct ibv_pd *pd, struct ibv_xrcd *xrcd, struct ibv_cq *cq)
{
	struct ibv_srq_init_attr_ex a = srq_attr(pd, xrcd, cq);
	struct ibv_srq *srq = ibv_create_srq_ex(pd->context, &a);
	TRUE(srq != NULL);
	return srq;
}

static uint32_t number(struct ibv_srq *srq)
{
	uint32_t n = 0;
	OK(ibv_get_srq_num(srq, &n));
	TRUE(n < 1 << 24);
	return n;
}

static struct ibv_qp *make_target(struct ibv_xrcd *xrcd)
{
	struct ibv_qp_init_attr_ex a = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_qp *qp = ibv_create_qp_ex(xrcd->context, &a);
	TRUE(qp != NULL);
	return qp;
}

static struct ibv_qp *make_initiator(struct ibv_pd *pd, struct ibv_cq *cq, uint64_t ops)
{
	struct ibv_qp_init_attr_ex a = { .qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .pd = pd, .send_ops_flags = ops,
		.cap = { .max_send_wr = 8, .max_recv_wr = 5, .max_send_sge = 2, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | (ops ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0) };
	struct ibv_qp *qp = ibv_create_qp_ex(pd->context, &a);
	TRUE(qp != NULL);
	EQ(a.cap.max_recv_wr, 0);
	return qp;
}

/* Both ends get all that an RC queue pair gets, as perftest does: what an end has no use for is ignored. */
static void to_ready_to_receive(struct ibv_qp *qp, uint32_t dest)
{
	to_init(qp);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = dest,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1 } };
	a.ah_attr.grh.dgid = own_gid(qp->context);
	a.ah_attr.grh.hop_limit = 64;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

static void bring_up(struct ibv_qp *qp, uint32_t dest)
{
	to_ready_to_receive(qp, dest);
	struct ibv_qp_attr a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					 IBV_QP_MAX_QP_RD_ATOMIC));
}

static void join(struct ibv_qp *initiator, struct ibv_qp *target)
{
	bring_up(target, initiator->qp_num);
	bring_up(initiator, target->qp_num);
}

static struct ibv_mr *memory(struct ibv_pd *pd, char *buf, size_t len)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
						     IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	TRUE(mr != NULL);
	return mr;
}

static void recv_into(struct ibv_srq *srq, struct ibv_mr *mr, uint64_t id, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = len, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
}

static int send_from(struct ibv_qp *qp, uint32_t srqn, struct ibv_mr *mr, uint64_t id, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = len, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
		.imm_data = htobe32(0x1234), .send_flags = IBV_SEND_SIGNALED }, *bad = NULL;
	wr.qp_type.xrc.remote_srqn = srqn;
	int ret = ibv_post_send(qp, &wr, &bad);
	TRUE(ret == 0 || bad == &wr);
	return ret;
}

/* The next event, which is of this kind and about this object; acknowledged. */
static void event(struct ibv_context *ctx, enum ibv_event_type type, void *of)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	EQ(poll(&p, 1, 10000), 1);
	struct ibv_async_event e;
	OK(ibv_get_async_event(ctx, &e));
	EQ(e.event_type, type);
	TRUE((void *)e.element.qp == of);
	ibv_ack_async_event(&e);
}

static void no_event(struct ibv_context *ctx)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	EQ(poll(&p, 1, 0), 0);
}

static void domains(struct ibv_context *ctx)
{
	struct ibv_device_attr dev;
	OK(ibv_query_device(ctx, &dev));
	TRUE(dev.device_cap_flags & IBV_DEVICE_XRC);

	struct ibv_xrcd_init_attr a = { .fd = -1, .oflags = O_CREAT };
	IS_NULL(ibv_open_xrcd(ctx, NULL), EINVAL);
	IS_NULL(ibv_open_xrcd(ctx, &a), EINVAL);
	a.comp_mask = IBV_XRCD_INIT_ATTR_FD;
	IS_NULL(ibv_open_xrcd(ctx, &a), EINVAL);
	a.comp_mask = IBV_XRCD_INIT_ATTR_RESERVED | IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	IS_NULL(ibv_open_xrcd(ctx, &a), EOPNOTSUPP);
	IS_NULL(try_xrcd(ctx, 12345, O_CREAT), EBADF);
	IS_NULL(try_xrcd(ctx, -2, O_CREAT), EBADF);

	/* Without a file each is its own. */
	struct ibv_xrcd *one = make_xrcd(ctx), *two = try_xrcd(ctx, -1, 0);
	TRUE(two != NULL && one != two);
	OK(ibv_close_xrcd(one));
	OK(ibv_close_xrcd(two));
	REFUSES(ctx == NULL ? 0 : ibv_close_xrcd(two), EINVAL);

	/* A file, by any descriptor and path. */
	char path[] = "/tmp/anyverbs-xrc-XXXXXX", other[64];
	int fd = mkstemp(path);
	TRUE(fd >= 0);
	snprintf(other, sizeof other, "%s.link", path);
	OK(link(path, other));
	int again = open(other, O_RDONLY);
	TRUE(again >= 0);
	IS_NULL(try_xrcd(ctx, fd, 0), EAGAIN);
	IS_NULL(try_xrcd(ctx, fd, O_EXCL), EAGAIN);
	one = try_xrcd(ctx, fd, O_CREAT | O_EXCL);
	TRUE(one != NULL);
	IS_NULL(try_xrcd(ctx, again, O_CREAT | O_EXCL), EINVAL);
	two = try_xrcd(ctx, again, 0);
	struct ibv_xrcd *three = try_xrcd(ctx, fd, O_CREAT);
	TRUE(two != NULL && three != NULL);
	OK(ibv_close_xrcd(one));
	OK(ibv_close_xrcd(three));
	/* It is there until the last one is closed, whatever becomes of the file. */
	OK(close(fd));
	OK(unlink(path));
	IS_NULL(try_xrcd(ctx, again, O_CREAT | O_EXCL), EINVAL);
	OK(ibv_close_xrcd(two));
	IS_NULL(try_xrcd(ctx, again, 0), EAGAIN);
	OK(unlink(other));
	OK(close(again));
}

static void shared_receive_queues(struct ibv_context *ctx, struct ibv_context *stranger)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *their_pd = ibv_alloc_pd(stranger);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_xrcd *xrcd = make_xrcd(ctx);
	const struct ibv_srq_init_attr_ex good = srq_attr(pd, xrcd, cq);
	struct ibv_srq_init_attr_ex a = good;
	for (int bit = 0; bit < 4; bit++) {
		a.comp_mask = good.comp_mask & ~(1 << bit);
		IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	}
	a.comp_mask = good.comp_mask | IBV_SRQ_INIT_ATTR_TM;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.cq = NULL;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.xrcd = NULL;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.xrcd = (struct ibv_xrcd *)pd;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.pd = their_pd;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.attr.max_wr = 0;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	/* One that matches tags is made of other parts. */
	a = good, a.srq_type = IBV_SRQT_TM;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);
	a = good, a.srq_type = 77;
	IS_NULL(ibv_create_srq_ex(ctx, &a), EINVAL);

	struct ibv_srq *one = make_srq(pd, xrcd, cq), *two = make_srq(pd, xrcd, cq);
	TRUE(number(one) != number(two));
	REFUSES(ibv_get_srq_num(one, NULL), EINVAL);
	struct ibv_srq_init_attr basic = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &basic);
	uint32_t n;
	REFUSES(ibv_get_srq_num(srq, &n), EOPNOTSUPP);
	OK(ibv_destroy_srq(srq));
	/* It is for targets. */
	struct ibv_qp_init_attr qi = { .send_cq = cq, .recv_cq = cq, .srq = one, .qp_type = IBV_QPT_RC };
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.qp_type = IBV_QPT_UD;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);

	REFUSES(ibv_close_xrcd(xrcd), EBUSY);
	REFUSES(ibv_destroy_cq(cq), EBUSY);
	REFUSES(ibv_dealloc_pd(pd), EBUSY);
	OK(ibv_destroy_srq(one));
	REFUSES(ibv_close_xrcd(xrcd), EBUSY);
	REFUSES(ibv_get_srq_num(one, &n), EINVAL);
	OK(ibv_destroy_srq(two));
	OK(ibv_close_xrcd(xrcd));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_dealloc_pd(their_pd));
}

static void queue_pairs(struct ibv_context *ctx, struct ibv_context *stranger)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_xrcd *xrcd = make_xrcd(ctx), *theirs = make_xrcd(stranger);
	struct ibv_qp_init_attr_ex a = { .qp_type = IBV_QPT_XRC_RECV, .xrcd = xrcd, .pd = pd, .send_cq = cq, .recv_cq = cq };
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.comp_mask = IBV_QP_INIT_ATTR_XRCD, a.xrcd = NULL;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.xrcd = theirs;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.xrcd = xrcd, a.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, a.send_ops_flags = IBV_QP_EX_WITH_SEND;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EOPNOTSUPP);
	/* A domain is for targets only, a target is made of nothing else. */
	a.comp_mask = IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_PD, a.qp_type = IBV_QPT_RC;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.qp_type = IBV_QPT_XRC_SEND;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	struct ibv_qp_init_attr qi = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_XRC_RECV };
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);

	struct ibv_qp *target = make_target(xrcd);
	TRUE(target->pd == NULL && target->send_cq == NULL && target->recv_cq == NULL && target->srq == NULL);
	EQ(target->qp_type, IBV_QPT_XRC_RECV);
	struct ibv_qp_attr qa;
	OK(ibv_query_qp(target, &qa, IBV_QP_STATE, &qi));
	EQ(qi.qp_type, IBV_QPT_XRC_RECV);
	TRUE(qi.cap.max_send_wr == 0 && qi.cap.max_recv_wr == 0);
	REFUSES(ibv_close_xrcd(xrcd), EBUSY);

	/* The other end needs no queue for receives, and looks at none. */
	qi = (struct ibv_qp_init_attr){ .send_cq = cq, .qp_type = IBV_QPT_XRC_SEND, .cap = { .max_send_wr = 1 } };
	struct ibv_qp *initiator = ibv_create_qp(pd, &qi);
	TRUE(initiator != NULL);
	OK(ibv_destroy_qp(initiator));
	qi.send_cq = NULL;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	initiator = make_initiator(pd, cq, 0);
	OK(ibv_query_qp(initiator, &qa, IBV_QP_STATE, &qi));
	EQ(qi.qp_type, IBV_QPT_XRC_SEND);
	TRUE(ibv_qp_to_qp_ex(initiator) == NULL);

	join(initiator, target);
	struct ibv_recv_wr rw = { 0 }, *bad_recv = NULL;
	struct ibv_send_wr sw = { .opcode = IBV_WR_SEND }, *bad_send = NULL;
	REFUSES(ibv_post_recv(initiator, &rw, &bad_recv), EINVAL);
	TRUE(bad_recv == &rw);
	REFUSES(ibv_post_recv(target, &rw, &bad_recv), EINVAL);
	REFUSES(ibv_post_send(target, &sw, &bad_send), EINVAL);
	TRUE(bad_send == &sw);
	/* Values count where the attribute does. */
	qa = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .min_rnr_timer = 77 };
	OK(ibv_modify_qp(initiator, &qa, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER));
	REFUSES(ibv_modify_qp(target, &qa, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER), EINVAL);
	OK(ibv_destroy_qp(target));
	REFUSES(ibv_destroy_qp(target), EINVAL);
	OK(ibv_destroy_qp(initiator));
	OK(ibv_close_xrcd(xrcd));
	OK(ibv_close_xrcd(theirs));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
}

/* What two ends of a connection in one process need. */
struct world {
	struct ibv_pd *pd, *other_pd;
	struct ibv_cq *send_cq, *cq[2];
	struct ibv_xrcd *xrcd;
	struct ibv_srq *srq[2];
	struct ibv_qp *initiator, *target;
	struct ibv_mr *from, *to[2];
	char buf[3][8192];
};

static struct world *make_world(struct ibv_context *ctx, uint64_t ops)
{
	struct world *w = calloc(1, sizeof *w);
	w->pd = ibv_alloc_pd(ctx), w->other_pd = ibv_alloc_pd(ctx);
	w->send_cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	w->xrcd = make_xrcd(ctx);
	for (int i = 0; i < 2; i++) {
		struct ibv_pd *pd = i ? w->other_pd : w->pd;
		w->cq[i] = ibv_create_cq(ctx, 16, NULL, NULL, 0);
		w->srq[i] = make_srq(pd, w->xrcd, w->cq[i]);
		w->to[i] = memory(pd, w->buf[1 + i], 8192);
	}
	w->from = memory(w->pd, w->buf[0], 8192);
	for (int i = 0; i < 8192; i++)
		w->buf[0][i] = i * 7 + i / 256;
	w->initiator = make_initiator(w->pd, w->send_cq, ops);
	w->target = make_target(w->xrcd);
	join(w->initiator, w->target);
	return w;
}

static void free_world(struct world *w)
{
	if (w->target)
		OK(ibv_destroy_qp(w->target));
	OK(ibv_destroy_qp(w->initiator));
	for (int i = 0; i < 2; i++) {
		if (w->srq[i])
			OK(ibv_destroy_srq(w->srq[i]));
		OK(ibv_destroy_cq(w->cq[i]));
		OK(ibv_dereg_mr(w->to[i]));
	}
	OK(ibv_close_xrcd(w->xrcd));
	OK(ibv_destroy_cq(w->send_cq));
	OK(ibv_dereg_mr(w->from));
	OK(ibv_dealloc_pd(w->pd));
	OK(ibv_dealloc_pd(w->other_pd));
	free(w);
}

static void traffic(struct ibv_context *ctx)
{
	struct world *w = make_world(ctx, 0);
	for (int i = 0; i < 2; i++) {
		recv_into(w->srq[i], w->to[i], 10 + i, 8192);
		OK(send_from(w->initiator, number(w->srq[i]), w->from, 20 + i, 5000));
		struct ibv_wc wc = poll_one(w->cq[i]);
		TRUE(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wr_id == 10u + i);
		TRUE(wc.byte_len == 5000 && wc.wc_flags == IBV_WC_WITH_IMM && be32toh(wc.imm_data) == 0x1234);
		EQ(wc.qp_num, w->target->qp_num);
		EQ(memcmp(w->buf[0], w->buf[1 + i], 5000), 0);
		wc = poll_one(w->send_cq);
		TRUE(wc.status == IBV_WC_SUCCESS && wc.wr_id == 20u + i && wc.qp_num == w->initiator->qp_num);
	}
	/* A READ is of the memory of the SRQ that it names. */
	struct ibv_sge sge = { .addr = (uintptr_t)w->from->addr, .length = 4000, .lkey = w->from->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = (uintptr_t)w->to[1]->addr + 4000;
	wr.wr.rdma.rkey = w->to[1]->rkey;
	wr.qp_type.xrc.remote_srqn = number(w->srq[1]);
	memset(w->buf[2] + 4000, 0x5a, 4000);
	OK(ibv_post_send(w->initiator, &wr, &bad));
	EQ(poll_one(w->send_cq).status, IBV_WC_SUCCESS);
	EQ(memcmp(w->buf[0], w->buf[2] + 4000, 4000), 0);
	/* The limit is told of the SRQ. */
	struct ibv_srq_attr sa = { .srq_limit = 1 };
	OK(ibv_modify_srq(w->srq[0], &sa, IBV_SRQ_LIMIT));
	recv_into(w->srq[0], w->to[0], 3, 100);
	OK(send_from(w->initiator, number(w->srq[0]), w->from, 4, 10));
	event(ctx, IBV_EVENT_SRQ_LIMIT_REACHED, w->srq[0]);
	poll_one(w->cq[0]), poll_one(w->send_cq);
	/* And the mistake: the other one's memory. */
	wr.qp_type.xrc.remote_srqn = number(w->srq[0]);
	OK(ibv_post_send(w->initiator, &wr, &bad));
	EQ(poll_one(w->send_cq).status, IBV_WC_REM_ACCESS_ERR);
	event(ctx, IBV_EVENT_QP_ACCESS_ERR, w->target);
	event(ctx, IBV_EVENT_QP_LAST_WQE_REACHED, w->target);
	free_world(w);
	no_event(ctx);
}

/* Whom a request may not name: 0 nobody, 1 a basic one, 2 one of another domain, 3 one that is gone. */
static void wrong_number(struct ibv_context *ctx, int whom)
{
	struct world *w = make_world(ctx, 0);
	struct ibv_xrcd *xrcd = make_xrcd(ctx);
	struct ibv_srq *stranger = make_srq(w->pd, xrcd, w->cq[0]);
	uint32_t n = whom == 2 ? number(stranger) : whom == 3 ? number(w->srq[1]) : number(w->srq[0]) ^ 0x8000;
	if (whom == 3) {
		OK(ibv_destroy_srq(w->srq[1]));
		w->srq[1] = NULL;
	}
	recv_into(stranger, w->to[0], 1, 8192);
	recv_into(w->srq[0], w->to[0], 2, 8192);
	OK(send_from(w->initiator, n, w->from, 3, 100));
	EQ(poll_one(w->send_cq).status, IBV_WC_REM_ACCESS_ERR);
	event(ctx, IBV_EVENT_QP_ACCESS_ERR, w->target);
	event(ctx, IBV_EVENT_QP_LAST_WQE_REACHED, w->target);
	struct ibv_wc wc;
	EQ(ibv_poll_cq(w->cq[0], 1, &wc), 0);
	OK(ibv_destroy_srq(stranger));
	OK(ibv_close_xrcd(xrcd));
	free_world(w);
	no_event(ctx);
}

static void opened(struct ibv_context *ctx, struct ibv_context *other)
{
	struct world *w = make_world(ctx, 0);
	struct ibv_qp_open_attr good = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = w->target->qp_num, .xrcd = w->xrcd, .qp_type = IBV_QPT_XRC_RECV, .qp_context = w };
	struct ibv_qp_open_attr a = good;
	struct ibv_xrcd *xrcd = make_xrcd(ctx);
	IS_NULL(ibv_open_qp(ctx, NULL), EINVAL);
	for (int bit = 0; bit < 4; bit++) {
		a.comp_mask = good.comp_mask & ~(1 << bit);
		if (a.comp_mask != good.comp_mask)
			IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	}
	a.comp_mask = good.comp_mask | IBV_QP_OPEN_ATTR_RESERVED;
	IS_NULL(ibv_open_qp(ctx, &a), EOPNOTSUPP);
	a = good, a.qp_type = IBV_QPT_RC;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	a = good, a.qp_num ^= 0x8000;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	a = good, a.qp_num = w->initiator->qp_num;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	a = good, a.xrcd = xrcd;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	a = good, a.qp_num |= 1 << 30;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	/* Of a process that there is not (xrc_shared.c has those that are). */
	a = good, a.qp_num ^= 1 << 16;
	IS_NULL(ibv_open_qp(ctx, &a), EINVAL);
	IS_NULL(ibv_open_qp(other, &good), EINVAL);

	good.comp_mask |= IBV_QP_OPEN_ATTR_CONTEXT;
	struct ibv_qp *again = ibv_open_qp(ctx, &good);
	TRUE(again != NULL && again != w->target && again->qp_num == w->target->qp_num);
	TRUE(again->qp_context == w && again->pd == NULL);
	EQ(again->qp_type, IBV_QPT_XRC_RECV);
	EQ(again->state, IBV_QPS_RTS);
	REFUSES(ibv_close_xrcd(w->xrcd), EBUSY);
	/* The first is given up, the queue pair stays. */
	uint32_t gone = w->target->qp_num;
	OK(ibv_destroy_qp(w->target));
	w->target = NULL;
	recv_into(w->srq[0], w->to[0], 1, 8192);
	OK(send_from(w->initiator, number(w->srq[0]), w->from, 2, 100));
	EQ(poll_one(w->cq[0]).qp_num, gone);
	EQ(poll_one(w->send_cq).status, IBV_WC_SUCCESS);
	/* Events go to all who have it open. */
	struct ibv_qp *third = ibv_open_qp(ctx, &good);
	to_err(third);
	struct ibv_qp_attr qa;
	struct ibv_qp_init_attr qi;
	OK(ibv_query_qp(again, &qa, IBV_QP_STATE, &qi));
	EQ(qa.qp_state, IBV_QPS_ERR);
	event(ctx, IBV_EVENT_QP_LAST_WQE_REACHED, again);
	event(ctx, IBV_EVENT_QP_LAST_WQE_REACHED, third);
	OK(ibv_destroy_qp(again));
	OK(ibv_destroy_qp(third));
	IS_NULL(ibv_open_qp(ctx, &good), EINVAL);
	OK(ibv_close_xrcd(xrcd));
	free_world(w);
	no_event(ctx);
}

/* A file's domain in two contexts of the process: the target of one serves the SRQ of the other. */
static void two_contexts(struct ibv_context *ctx, struct ibv_context *other)
{
	FILE *f = tmpfile();
	TRUE(f != NULL);
	struct ibv_xrcd *mine = try_xrcd(ctx, fileno(f), O_CREAT), *theirs = try_xrcd(other, fileno(f), 0);
	TRUE(mine != NULL && theirs != NULL);
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *their_pd = ibv_alloc_pd(other);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0), *their_cq = ibv_create_cq(other, 8, NULL, NULL, 0);
	static char buf[2][4096] = { "from one to the other" };
	struct ibv_mr *from = memory(pd, buf[0], 4096), *to = memory(their_pd, buf[1], 4096);
	struct ibv_srq *srq = make_srq(their_pd, theirs, their_cq);
	struct ibv_qp *initiator = make_initiator(pd, cq, 0), *target = make_target(mine);
	to_ready_to_receive(target, initiator->qp_num);
	bring_up(initiator, target->qp_num);
	/* It is opened in the other context as well, and outlives the first handle of the domain. */
	struct ibv_qp_open_attr a = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = target->qp_num, .xrcd = theirs, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_qp *opened = ibv_open_qp(other, &a);
	TRUE(opened != NULL && opened->qp_context == NULL);
	OK(ibv_destroy_qp(target));
	OK(ibv_close_xrcd(mine));
	recv_into(srq, to, 1, 4096);
	OK(send_from(initiator, number(srq), from, 2, 100));
	EQ(poll_one(their_cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(cq).status, IBV_WC_SUCCESS);
	EQ(strcmp(buf[0], buf[1]), 0);
	event(other, IBV_EVENT_COMM_EST, opened);
	REFUSES(ibv_close_xrcd(theirs), EBUSY);
	OK(ibv_destroy_qp(opened));
	OK(ibv_destroy_qp(initiator));
	OK(ibv_destroy_srq(srq));
	OK(ibv_close_xrcd(theirs));
	OK(ibv_dereg_mr(from));
	OK(ibv_dereg_mr(to));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_cq(their_cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_dealloc_pd(their_pd));
	fclose(f);
}

static void built_call_by_call(struct ibv_context *ctx)
{
	struct world *w = make_world(ctx, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(w->initiator);
	TRUE(qp != NULL);
	recv_into(w->srq[0], w->to[0], 1, 8192);
	/* Without the number nothing is posted. */
	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, w->from->lkey, (uintptr_t)w->from->addr, 100);
	REFUSES(ibv_wr_complete(qp), EINVAL);
	ibv_wr_start(qp);
	ibv_wr_set_xrc_srqn(qp, number(w->srq[0]));
	REFUSES(ibv_wr_complete(qp), EINVAL);
	ibv_wr_start(qp);
	qp->wr_id = 5;
	ibv_wr_send(qp);
	ibv_wr_set_xrc_srqn(qp, number(w->srq[0]));
	ibv_wr_set_sge(qp, w->from->lkey, (uintptr_t)w->from->addr, 100);
	OK(ibv_wr_complete(qp));
	EQ(poll_one(w->cq[0]).byte_len, 100);
	EQ(poll_one(w->send_cq).wr_id, 5);
	free_world(w);

	/* On others it is a mistake. */
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex a = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 2, .max_send_sge = 1 }, .send_ops_flags = IBV_QP_EX_WITH_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS };
	struct ibv_qp *rc = ibv_create_qp_ex(ctx, &a);
	to_init(rc), to_rtr(rc, rc->qp_num), to_rts(rc);
	qp = ibv_qp_to_qp_ex(rc);
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_xrc_srqn(qp, 1);
	REFUSES(ibv_wr_complete(qp), EINVAL);
	OK(ibv_destroy_qp(rc));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
}

/* The CQ of an SRQ overruns: the SRQ is done for, and the target whose completion was lost. */
static void overrun(struct ibv_context *ctx)
{
	struct world *w = make_world(ctx, 0);
	OK(ibv_destroy_srq(w->srq[1]));
	OK(ibv_destroy_cq(w->cq[1]));
	w->cq[1] = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	w->srq[1] = make_srq(w->other_pd, w->xrcd, w->cq[1]);
	int room = w->cq[1]->cqe;
	for (int i = 0; i <= room; i++) {
		recv_into(w->srq[1], w->to[1], i, 100);
		OK(send_from(w->initiator, number(w->srq[1]), w->from, i, 10));
		struct ibv_wc wc = poll_one(w->send_cq);
		TRUE(wc.status == IBV_WC_SUCCESS || i == room);
	}
	event(ctx, IBV_EVENT_CQ_ERR, w->cq[1]);
	event(ctx, IBV_EVENT_SRQ_ERR, w->srq[1]);
	event(ctx, IBV_EVENT_QP_FATAL, w->target);
	event(ctx, IBV_EVENT_QP_LAST_WQE_REACHED, w->target);
	free_world(w);
	no_event(ctx);
}

int main(void)
{
	struct ibv_context *ctx = open_device(), *other = open_device();
	domains(ctx);
	shared_receive_queues(ctx, other);
	queue_pairs(ctx, other);
	traffic(ctx);
	for (int whom = 0; whom < 4; whom++)
		wrong_number(ctx, whom);
	opened(ctx, other);
	two_contexts(ctx, other);
	built_call_by_call(ctx);
	overrun(ctx);
	OK(ibv_close_device(other));
	OK(ibv_close_device(ctx));
	return 0;
}
