/* "Who holds whom": destroy returns EBUSY and the object stays usable. S1.7. */
#include "check.h"

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, channel, 0);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(channel && cq && pd);
	REFUSES(ibv_destroy_comp_channel(channel), EBUSY);

	char buf[64];
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
	REFUSES(ibv_dealloc_pd(pd), EBUSY);
	OK(ibv_dereg_mr(mr));

	struct ibv_ah_attr aa = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx) } };
	struct ibv_ah *ah = ibv_create_ah(pd, &aa);
	REFUSES(ibv_dealloc_pd(pd), EBUSY);
	OK(ibv_destroy_ah(ah));

	struct ibv_srq_init_attr si = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	REFUSES(ibv_dealloc_pd(pd), EBUSY);

	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, srq, 0);
	REFUSES(ibv_destroy_srq(srq), EBUSY);
	REFUSES(ibv_destroy_cq(cq), EBUSY);
	REFUSES(ibv_dealloc_pd(pd), EBUSY);

	/* All of them still work. */
	struct ibv_recv_wr wr = { 0 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
	OK(ibv_req_notify_cq(cq, 0));
	mr = ibv_reg_mr(pd, buf, sizeof buf, 0);
	TRUE(mr != NULL);
	to_init(qp);

	/* S1.7: in any state, work outstanding. */
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_srq(srq));
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_comp_channel(channel));
	OK(ibv_close_device(ctx));
	return 0;
}
