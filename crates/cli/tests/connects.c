/* Two queue pairs of one process that it connects. It says which call failed, and with what; or what happened to a queue pair
   that has nothing under way.

   connects   connects them by a function of its own
   idle       lets them talk, and waits for an event when all has completed */
#include "../../capi/tests/c/check.h"

/* perftest's function of this name moves each queue pair to RTR and then to RTS. */
__attribute__((noinline)) static const char *ctx_connect(struct ibv_qp *qp, uint32_t dest)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = dest, .max_dest_rd_atomic = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(qp->context), .hop_limit = 64 } } };
	int error = ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (error) {
		errno = error;
		return "RTR";
	}
	to_rts(qp);
	return NULL;
}

static int connects(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	/* Calls of other functions, which the rule does not count. */
	to_init(a.qp);
	to_init(b.qp);
	const char *failed = ctx_connect(a.qp, b.qp->qp_num);
	printf("%s: %s\n", failed ? failed : "connected", failed ? strerror(errno) : "");
	return 0;
}

static int idle(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	for (int n = 0; n < 10; n++) {
		OK(post_recv(&b, 1, 64));
		OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
		EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	}
	struct ibv_async_event event;
	OK(ibv_get_async_event(pd->context, &event));
	TRUE(event.element.qp == a.qp);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init));
	struct ibv_wc wc;
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	printf("%s, state %d, nothing to flush\n", ibv_event_type_str(event.event_type), attr.qp_state);
	ibv_ack_async_event(&event);
	return 0;
}

int main(int argc, char **argv)
{
	struct ibv_pd *pd = ibv_alloc_pd(open_device());
	TRUE(pd != NULL);
	return argc > 1 && !strcmp(argv[1], "idle") ? idle(pd) : connects(pd);
}
