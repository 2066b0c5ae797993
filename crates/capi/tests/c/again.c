// What a program does wrong again and again is said once, and then at the tenth time, the hundredth and so on.
#include <assert.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>

static void *misaligned(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
	(void)pd, (void)pd_context, (void)size, (void)alignment, (void)type;
	static char memory[1 << 16] __attribute__((aligned(4096)));
	return memory + 1;
}

static void nothing(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t type)
{
	(void)pd, (void)pd_context, (void)ptr, (void)type;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	assert(context);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	assert(pd && cq && qp);
	for (int i = 0; i < 1000; i++) {
		assert(ibv_destroy_cq(cq) == EBUSY);
		assert(ibv_dealloc_pd(pd) == EBUSY);
	}
	union ibv_gid gid;
	assert(ibv_query_gid(context, 1, 0, &gid) == 0);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .grh = { .dgid = gid, .hop_limit = 1 }, .port_num = 1 };
	struct ibv_ah *ah = ibv_create_ah(pd, &ah_attr);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1 };
	assert(ah && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	assert(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	assert(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .wr.ud = { .ah = ah, .remote_qpn = qp->qp_num, .remote_qkey = 1 } }, *bad;
	assert(ibv_destroy_ah(ah) == 0);
	for (int i = 0; i < 1000; i++)
		assert(ibv_post_send(qp, &wr, &bad) == EINVAL);
	/* An allocator whose memory cannot be used. */
	struct ibv_parent_domain_init_attr domain = {
		.pd = pd, .alloc = misaligned, .free = nothing, .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS,
	};
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &domain);
	assert(parent);
	for (int i = 0; i < 1000; i++)
		assert(!ibv_create_qp(parent, &init));
	return 0;
}
