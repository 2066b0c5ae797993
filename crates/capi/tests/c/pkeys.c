/* The table of P_Keys of each device, and queue pairs that take an index of it. */
#include "check.h"
#include <arpa/inet.h>

int main(void)
{
	int n = -1;
	struct ibv_device **list = ibv_get_device_list(&n);
	TRUE(list != NULL);
	EQ(n, 2);
	struct ibv_context *ctx = ibv_open_device(list[0]), *other = ibv_open_device(list[1]);
	TRUE(ctx != NULL && other != NULL);
	ibv_free_device_list(list);

	static const uint16_t keys[] = { 0xffff, 0x8001, 0x0002 };
	__be16 key = 0;
	for (int i = 0; i < 3; i++) {
		OK(ibv_query_pkey(ctx, 1, i, &key));
		EQ(key, htons(keys[i]));
		EQ(ibv_get_pkey_index(ctx, 1, htons(keys[i])), i);
	}
	MINUS_ONE(ibv_query_pkey(ctx, 1, 3, &key), EINVAL);
	EQ(ibv_get_pkey_index(ctx, 1, htons(0x8003)), -1);
	OK(ibv_query_pkey(other, 1, 0, &key));
	EQ(key, 0xffff);
	MINUS_ONE(ibv_query_pkey(other, 1, 1, &key), EINVAL);

	struct ibv_device_attr device;
	struct ibv_port_attr port;
	OK(ibv_query_device(ctx, &device));
	OK(ibv_query_port(ctx, 1, &port));
	EQ(device.max_pkeys, 3);
	EQ(port.pkey_tbl_len, 3);

	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	TRUE(pd != NULL && cq != NULL);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = 3 };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	REFUSES(ibv_modify_qp(qp, &attr, mask), EINVAL);
	attr.pkey_index = 2;
	OK(ibv_modify_qp(qp, &attr, mask));
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(qp, &attr, IBV_QP_PKEY_INDEX, &init));
	EQ(attr.pkey_index, 2);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(other));
	OK(ibv_close_device(ctx));
	return 0;
}
