/*
 * Asynchronous events: each is raised once, when and for what its manual page says, and the object that it is about is not
 * destroyed before it is acknowledged (S1.6); one that nobody read goes with its object. The events of XRC are in xrc.c,
 * those of errors of a peer in mismatches.c, the last WQE (S1.4) in destroy_qp.c, those of the port in the tests of the
 * device.
 */
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;

static int waits(int ms)
{
	struct pollfd pfd = { .fd = ctx->async_fd, .events = POLLIN };
	return poll(&pfd, 1, ms);
}

static struct ibv_async_event next_event(enum ibv_event_type type, void *about)
{
	struct ibv_async_event event;
	EQ(waits(5000), 1);
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, type);
	TRUE(event.element.qp == about);
	return event;
}

struct destroying {
	int (*destroy)(void *);
	void *object;
	int done;
};

static void *destroy(void *arg)
{
	struct destroying *d = arg;
	OK(d->destroy(d->object));
	__atomic_store_n(&d->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

/* The object is destroyed, but not before its event is acknowledged. */
static void held(struct ibv_async_event *event, int (*how)(void *), void *object)
{
	struct destroying d = { .destroy = how, .object = object };
	pthread_t thread;
	OK(pthread_create(&thread, NULL, destroy, &d));
	usleep(50000);
	EQ(__atomic_load_n(&d.done, __ATOMIC_SEQ_CST), 0);
	ibv_ack_async_event(event);
	OK(pthread_join(thread, NULL));
}

static int no_qp(void *qp) { return ibv_destroy_qp(qp); }
static int no_cq(void *cq) { return ibv_destroy_cq(cq); }
static int no_srq(void *srq) { return ibv_destroy_srq(srq); }
static int no_wq(void *wq) { return ibv_destroy_wq(wq); }

static void free_rest(struct end *e)
{
	if (e->cq)
		OK(ibv_destroy_cq(e->cq));
	OK(ibv_dereg_mr(e->mr));
	free(e->buf);
}

static void send(struct end *e, uint64_t id, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)e->buf, length, e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	OK(ibv_post_send(e->qp, &wr, &bad));
}

static void receive(struct end *e, struct ibv_srq *srq)
{
	struct ibv_sge sge = { (uintptr_t)e->buf, 64, e->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad));
}

/* S5.11: the send queue has drained, told to who asked for it. */
static void drained(void)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD };
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));
	EQ(waits(50), 0);
	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));

	/* A send waits for its receive: drained when it is done, not before. */
	send(&a, 1, 64);
	attr.qp_state = IBV_QPS_SQD, attr.en_sqd_async_notify = 1;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	EQ(waits(50), 0);
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init));
	EQ(attr.sq_draining, 1);
	receive(&b, NULL);
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	struct ibv_async_event event = next_event(IBV_EVENT_SQ_DRAINED, a.qp);
	EQ(waits(0), 0);
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init));
	EQ(attr.sq_draining, 0);
	/* Acknowledged twice: the second one is nobody's. */
	ibv_ack_async_event(&event);
	ibv_ack_async_event(&event);

	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_SQD;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	event = next_event(IBV_EVENT_SQ_DRAINED, a.qp);
	held(&event, no_qp, a.qp);
	free_rest(&a);
	free_end(&b);
}

/* The first message in RTR. */
static void established(void)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	to_init(a.qp), to_init(b.qp);
	receive(&b, NULL);
	to_rtr(a.qp, b.qp->qp_num), to_rtr(b.qp, a.qp->qp_num);
	to_rts(a.qp);
	EQ(waits(0), 0);
	send(&a, 1, 64);
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	struct ibv_async_event event = next_event(IBV_EVENT_COMM_EST, b.qp);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	held(&event, no_qp, b.qp);
	EQ(waits(0), 0);
	free_rest(&b);
	free_end(&a);
}

static void limit_reached(void)
{
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	TRUE(srq != NULL);
	OK(ibv_destroy_qp(b.qp));
	b.qp = make_qp(pd, b.cq, IBV_QPT_RC, srq, 0);
	connect_ends(&a, &b);
	for (int i = 0; i < 4; i++)
		receive(&b, srq);
	struct ibv_srq_attr limit = { .srq_limit = 3 };
	OK(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	EQ(waits(0), 0);
	for (int i = 0; i < 2; i++) {
		send(&a, 1, 64);
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
		/* Three are left, which is not below three; then two. */
		EQ(waits(0), i);
	}
	struct ibv_async_event event = next_event(IBV_EVENT_SRQ_LIMIT_REACHED, srq);
	/* It is armed once. */
	OK(ibv_query_srq(srq, &limit));
	EQ(limit.srq_limit, 0);
	send(&a, 1, 64);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(waits(0), 0);
	/* Armed where it holds already: told with the next receive that is taken. */
	ibv_ack_async_event(&event);
	limit.srq_limit = 3;
	OK(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	EQ(waits(0), 0);
	send(&a, 1, 64);
	event = next_event(IBV_EVENT_SRQ_LIMIT_REACHED, srq);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	OK(ibv_destroy_qp(b.qp));
	held(&event, no_srq, srq);
	free_rest(&b);
	free_end(&a);
}

/* A completion queue overruns: its event, then those of what is attached to it. */
static void overrun(void)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_cq *small = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	TRUE(small != NULL);
	OK(ibv_destroy_qp(a.qp));
	a.qp = make_qp(pd, small, IBV_QPT_RC, NULL, 0);
	struct ibv_wq_init_attr wi = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1, .pd = pd, .cq = small };
	struct ibv_wq *wq = ibv_create_wq(ctx, &wi);
	TRUE(wq != NULL);
	struct ibv_wq_attr ready = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY };
	OK(ibv_modify_wq(wq, &ready));
	connect_ends(&a, &b);
	for (int i = 0; i < 2; i++) {
		receive(&b, NULL);
		send(&a, i, 64);
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	}
	struct ibv_async_event cq_err = next_event(IBV_EVENT_CQ_ERR, small), other[2];
	int seen = 0;
	for (int i = 0; i < 2; i++) {
		OK(ibv_get_async_event(ctx, &other[i]));
		int of_wq = other[i].event_type == IBV_EVENT_WQ_FATAL;
		EQ(other[i].event_type, of_wq ? IBV_EVENT_WQ_FATAL : IBV_EVENT_QP_FATAL);
		TRUE(of_wq ? other[i].element.wq == wq : other[i].element.qp == a.qp);
		seen |= 1 << of_wq;
	}
	EQ(seen, 3);
	EQ(waits(0), 0);
	for (int i = 0; i < 2; i++) {
		int of_wq = other[i].event_type == IBV_EVENT_WQ_FATAL;
		held(&other[i], of_wq ? no_wq : no_qp, of_wq ? (void *)wq : (void *)a.qp);
	}
	held(&cq_err, no_cq, small);
	OK(ibv_destroy_cq(a.cq));
	a.cq = NULL;
	free_rest(&a);
	free_end(&b);
}

/* An event that nobody read goes with its object; who reads later finds those of others. */
static void unread(void)
{
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_qp *one = make_qp(pd, cq, IBV_QPT_RC, srq, 0), *two = make_qp(pd, cq, IBV_QPT_RC, srq, 0);
	to_init(one), to_init(two);
	to_err(one), to_err(two);
	EQ(waits(5000), 1);
	OK(ibv_destroy_qp(one));
	struct ibv_async_event event = next_event(IBV_EVENT_QP_LAST_WQE_REACHED, two);
	EQ(waits(0), 0);
	held(&event, no_qp, two);
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(cq));
}

int main(void)
{
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	drained();
	established();
	limit_reached();
	overrun();
	unread();
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
