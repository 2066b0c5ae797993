/* Meets rules of every kind, in one order: datagrams, unreliable writes, reliable ones that fail and go on, calls, and queue pairs that
   fail as soon as they are ready. It does one thing at a time, so that nothing depends on time. */
#include "../../capi/tests/c/check.h"

enum { TIMES = 200 };

static struct ibv_pd *pd;

/* A post that the rules refuse is no failure. */
static bool posts(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	int error = ibv_post_send(qp, wr, &bad);
	TRUE(error == 0 || error == EAGAIN);
	return error == 0;
}

/* Queue pairs 1 and 2. Nobody receives: the datagrams are lost at the latest there. */
static void datagrams(void)
{
	struct end a = make_end(pd, IBV_QPT_UD), b = make_end(pd, IBV_QPT_UD);
	connect_ends(&a, &b);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(pd->context), .hop_limit = 64 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	TRUE(ah != NULL);
	struct ibv_sge sge = { (uintptr_t)a.buf, 64, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
				  .wr.ud = { ah, b.qp->qp_num, 0x11111111 } };
	for (int n = 0; n < TIMES; n++)
		if (posts(a.qp, &wr))
			EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
}

static void write_once(struct end *a, struct end *b, enum ibv_wc_status *status)
{
	struct ibv_sge sge = { (uintptr_t)a->buf, 64, a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { (uintptr_t)b->buf, b->mr->rkey } };
	*status = posts(a->qp, &wr) ? poll_one(a->cq).status : IBV_WC_SUCCESS;
}

/* Queue pairs 3 and 4. */
static void unreliable_writes(void)
{
	struct end a = make_end(pd, IBV_QPT_UC), b = make_end(pd, IBV_QPT_UC);
	enum ibv_wc_status status;
	connect_ends(&a, &b);
	for (int n = 0; n < TIMES; n++) {
		write_once(&a, &b, &status);
		EQ(status, IBV_WC_SUCCESS);
	}
}

/* Queue pairs 5 and 6, which are connected anew after each failure. */
static void reliable_writes(void)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	enum ibv_wc_status status;
	connect_ends(&a, &b);
	for (int n = 0; n < TIMES; n++) {
		write_once(&a, &b, &status);
		if (status == IBV_WC_SUCCESS)
			continue;
		EQ(status, IBV_WC_RETRY_EXC_ERR);
		struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
		OK(ibv_modify_qp(a.qp, &reset, IBV_QP_STATE));
		OK(ibv_modify_qp(b.qp, &reset, IBV_QP_STATE));
		connect_ends(&a, &b);
	}
}

__attribute__((noinline)) static void calls(void)
{
	static char memory[64];
	for (int n = 0; n < TIMES; n++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, 0);
		if (mr)
			OK(ibv_dereg_mr(mr));
		else
			EQ(errno, ENOMEM);
	}
}

/* Queue pairs 7 and 8. */
static void queue_pair(void)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_async_event event;
	connect_ends(&a, &b);
	OK(ibv_get_async_event(pd->context, &event));
	EQ(event.event_type, IBV_EVENT_QP_FATAL);
	TRUE(event.element.qp == a.qp);
	ibv_ack_async_event(&event);
}

int main(void)
{
	pd = ibv_alloc_pd(open_device());
	TRUE(pd != NULL);
	datagrams();
	unreliable_writes();
	reliable_writes();
	queue_pair();
	calls();
	return 0;
}
