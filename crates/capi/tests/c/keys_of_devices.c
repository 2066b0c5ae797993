/* Keys of the second device of a process, at queue pairs of the first one: in an element, and in a request of the peer. */
#include "check.h"

int main(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	EQ(n, 2);
	struct ibv_context *ctx = ibv_open_device(list[0]), *other = ibv_open_device(list[1]);
	ibv_free_device_list(list);
	TRUE(ctx && other);
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *other_pd = ibv_alloc_pd(other);
	static char bytes[64];
	struct ibv_mr *mr = ibv_reg_mr(other_pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	TRUE(pd && other_pd && mr);
	for (int remote = 0; remote < 2; remote++) {
		struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
		connect_ends(&a, &b);
		struct ibv_mr *own = remote ? a.mr : mr, *peers = remote ? mr : b.mr;
		struct ibv_sge sge = { .addr = (uintptr_t)own->addr, .length = 8, .lkey = own->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { .remote_addr = (uintptr_t)peers->addr, .rkey = peers->rkey } }, *bad;
		OK(ibv_post_send(a.qp, &wr, &bad));
		EQ(poll_one(a.cq).status, remote ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR);
		free_end(&a), free_end(&b);
	}
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(pd) || ibv_dealloc_pd(other_pd));
	OK(ibv_close_device(ctx) || ibv_close_device(other));
	return 0;
}
