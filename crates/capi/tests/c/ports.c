/* A device has one port. Calls that name a second one refuse it. */
#include "check.h"

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	union ibv_gid gid;
	__be16 key;

	OK(ibv_query_device(ctx, &device));
	EQ(device.phys_port_cnt, 1);
	OK(ibv_query_port(ctx, 1, &port));
	REFUSES(ibv_query_port(ctx, 2, &port), EINVAL);
	OK(ibv_query_gid(ctx, 1, 0, &gid));
	union ibv_gid other;
	MINUS_ONE(ibv_query_gid(ctx, 2, 0, &other), EINVAL);
	MINUS_ONE(ibv_query_pkey(ctx, 2, 0, &key), EINVAL);

	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 2, .grh = { .dgid = gid, .hop_limit = 1 } };
	IS_NULL(ibv_create_ah(pd, &ah), EINVAL);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 2 };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	REFUSES(ibv_modify_qp(qp, &attr, mask), EINVAL);
	attr.port_num = 1;
	OK(ibv_modify_qp(qp, &attr, mask));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
