/* Two devices of a configuration file that gives each a GUID, an MTU or limits: what they show, and what they refuse. */
#include "check.h"

static struct ibv_context *open_named(const char *name)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	TRUE(list != NULL);
	EQ(n, 2);
	for (int i = 0; i < n; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			return ibv_open_device(list[i]);
	return NULL;
}

static struct ibv_qp *make(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t wrs, uint32_t sges)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = wrs, .max_recv_wr = 1, .max_send_sge = sges, .max_recv_sge = 1 } };
	return ibv_create_qp(pd, &init);
}

static union ibv_gid group(uint8_t n)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 78, [15] = n } };
	return gid;
}

/* Groups, which each device counts by itself as well. */
static void attach(struct ibv_pd **pds, struct ibv_cq **cqs)
{
	struct ibv_qp *qps[3];
	union ibv_gid first = group(1), second = group(2);
	for (int n = 0; n < 3; n++) {
		struct ibv_qp_init_attr init = { .send_cq = cqs[n / 2], .recv_cq = cqs[n / 2], .qp_type = IBV_QPT_UD,
						 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
		TRUE((qps[n] = ibv_create_qp(pds[n / 2], &init)) != NULL);
	}
	OK(ibv_attach_mcast(qps[0], &first, 0));
	REFUSES(ibv_attach_mcast(qps[0], &second, 0), ENOMEM);
	REFUSES(ibv_attach_mcast(qps[1], &first, 0), ENOMEM);
	OK(ibv_attach_mcast(qps[2], &first, 0));
	OK(ibv_attach_mcast(qps[2], &second, 0));
	for (int n = 0; n < 3; n += 2)
		OK(ibv_detach_mcast(qps[n], &first, 0));
	OK(ibv_detach_mcast(qps[2], &second, 0));
	for (int n = 0; n < 3; n++)
		OK(ibv_destroy_qp(qps[n]));
}

/* A queue pair that has ibv_wr_*. */
static struct ibv_qp *make_extended(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 3, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE };
	struct ibv_qp *qp = ibv_create_qp_ex(pd->context, &init);
	TRUE(qp != NULL);
	return qp;
}

static void three(struct ibv_sge *sges, struct ibv_mr *mr)
{
	for (int n = 0; n < 3; n++)
		sges[n] = (struct ibv_sge){ .addr = (uintptr_t)mr->addr + 8 * n, .length = 4, .lkey = mr->lkey };
}

static void completes(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_wc wc = poll_one(qp->send_cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.wr_id, id);
}

/* A READ takes fewer elements than other requests do. */
static void read_into_elements(struct ibv_qp *qp, struct ibv_mr *mr)
{
	struct ibv_sge sges[3];
	three(sges, mr);
	struct ibv_send_wr wrs[3], *bad = NULL;
	for (int n = 0; n < 3; n++)
		wrs[n] = (struct ibv_send_wr){ .wr_id = n, .next = n < 2 ? &wrs[n + 1] : NULL, .sg_list = sges, .num_sge = 2 + (n == 1),
			.opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { .remote_addr = (uintptr_t)mr->addr + 32, .rkey = mr->rkey } };
	EQ(ibv_post_send(qp, wrs, &bad), EINVAL);
	TRUE(bad == &wrs[1]);
	completes(qp, 0);
	OK(ibv_post_send(qp, &wrs[2], &bad));
	completes(qp, 2);
	/* A WRITE may have them. */
	wrs[2].opcode = IBV_WR_RDMA_WRITE, wrs[2].num_sge = 3;
	OK(ibv_post_send(qp, &wrs[2], &bad));
	completes(qp, 2);
}

static void build_reads(struct ibv_qp *qp, struct ibv_mr *mr)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_sge sges[3];
	three(sges, mr);
	for (int sges_of_last = 3; sges_of_last > 1; sges_of_last--) {
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		for (int n = 0; n < 2; n++) {
			ex->wr_id = 10 + n;
			ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)mr->addr + 32);
			ibv_wr_set_sge_list(ex, n ? sges_of_last : 2, sges);
		}
		EQ(ibv_wr_complete(ex), sges_of_last == 3 ? EINVAL : 0);
	}
	/* The first two were not posted. */
	completes(qp, 10);
	completes(qp, 11);
	struct ibv_wc wc;
	EQ(ibv_poll_cq(qp->send_cq, 1, &wc), 0);
}

int main(void)
{
	struct ibv_context *rails[2] = { open_named("rail0"), open_named("rail1") };
	struct ibv_device_attr attr;
	struct ibv_port_attr port;

	TRUE(rails[0] && rails[1]);
	OK(ibv_query_device(rails[0], &attr));
	EQ(be64toh(attr.node_guid), 0x0002c90300aabbcc);
	EQ(attr.sys_image_guid, attr.node_guid);
	EQ(ibv_get_device_guid(rails[0]->device), attr.node_guid);
	EQ(attr.max_qp, 2);
	EQ(attr.max_cqe, 64);
	EQ(attr.max_sge, 3);
	EQ(attr.max_sge_rd, 2);
	EQ(attr.max_cq, 32768);
	OK(ibv_query_port(rails[0], 1, &port));
	EQ(port.active_mtu, IBV_MTU_1024);
	OK(ibv_query_port(rails[1], 1, &port));
	EQ(port.active_mtu, IBV_MTU_4096);
	OK(ibv_query_device(rails[1], &attr));
	EQ(attr.max_qp, 3);
	EQ(attr.max_sge, 4);
	EQ(attr.max_srq, 0);

	/* Sizes. */
	struct ibv_pd *pds[2] = { ibv_alloc_pd(rails[0]), ibv_alloc_pd(rails[1]) };
	struct ibv_cq *cqs[2] = { ibv_create_cq(rails[0], 64, NULL, NULL, 0), ibv_create_cq(rails[1], 64, NULL, NULL, 0) };
	TRUE(pds[0] && pds[1] && cqs[0] && cqs[1]);
	IS_NULL(ibv_create_cq(rails[0], 65, NULL, NULL, 0), EINVAL);
	for (int n = 0; n < 2; n++) {
		REFUSES(ibv_resize_cq(cqs[0], 65), EINVAL);
		REFUSES(ibv_resize_cq(cqs[1], 66), EINVAL);
	}
	OK(ibv_resize_cq(cqs[1], 65));
	IS_NULL(make(pds[0], cqs[0], 9, 1), EINVAL);
	IS_NULL(make(pds[0], cqs[0], 8, 4), EINVAL);
	IS_NULL(make(pds[1], cqs[1], 9, 5), EINVAL);

	attach(pds, cqs);

	/* Numbers, which each device counts by itself. */
	struct ibv_pd *second = ibv_alloc_pd(rails[0]);
	TRUE(second != NULL);
	IS_NULL(ibv_alloc_pd(rails[0]), ENOMEM);
	TRUE(ibv_alloc_pd(rails[1]) != NULL);
	struct ibv_qp *made[2][3];
	for (int rail = 0; rail < 2; rail++) {
		for (int n = 0; n < 2 + rail; n++)
			TRUE((made[rail][n] = make(pds[rail], cqs[rail], 8, 3)) != NULL);
		IS_NULL(make(pds[rail], cqs[rail], 8, 3), ENOMEM);
	}
	static char bytes[64];
	struct ibv_mr *mr = ibv_reg_mr(pds[0], bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	TRUE(mr != NULL);
	for (int n = 1; n < 4; n++)
		TRUE(ibv_reg_mr(pds[0], bytes, sizeof bytes, 0) != NULL);
	IS_NULL(ibv_reg_mr(pds[0], bytes, sizeof bytes, 0), ENOMEM);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq *queue = ibv_create_srq(pds[0], &srq);
	TRUE(queue != NULL);
	IS_NULL(ibv_create_srq(pds[0], &srq), ENOMEM);
	REFUSES(ibv_modify_srq(queue, &(struct ibv_srq_attr){ .max_wr = 10 }, IBV_SRQ_MAX_WR), EINVAL);
	OK(ibv_modify_srq(queue, &(struct ibv_srq_attr){ .max_wr = 9 }, IBV_SRQ_MAX_WR));
	/* One that is destroyed makes room, on its own device. */
	OK(ibv_destroy_qp(made[0][0]));
	IS_NULL(make(pds[1], cqs[1], 8, 3), ENOMEM);
	struct ibv_qp *other = make_extended(pds[0], cqs[0]);

	/* A path MTU above that of the port. */
	struct ibv_qp *qp = made[0][1];
	to_init(qp);
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_2048, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 4,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(rails[0]), .hop_limit = 64 } } };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
		   IBV_QP_MIN_RNR_TIMER;
	REFUSES(ibv_modify_qp(qp, &rtr, mask), EINVAL);
	rtr.path_mtu = IBV_MTU_1024;
	OK(ibv_modify_qp(qp, &rtr, mask));
	to_rts(qp);
	read_into_elements(qp, mr);
	to_init(other);
	rtr.dest_qp_num = other->qp_num;
	OK(ibv_modify_qp(other, &rtr, mask));
	to_rts(other);
	build_reads(other, mr);
	return 0;
}
