/* A device with a persona: what it shows, and what it refuses. */
#include "check.h"

/* Of the headers of providers. */
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static struct ibv_qp *make(enum ibv_qp_type type, struct ibv_qp_cap cap)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = cap, .qp_type = type };
	return ibv_create_qp(pd, &init);
}

static const struct ibv_qp_cap SMALL = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 };

/* Entries that carry no traffic are refused where a program names them, and the one beside them is not. */
static void gids(int carries, int count)
{
	struct ibv_gid_entry entry;
	for (int i = 0; i < count; i++) {
		union ibv_gid gid;
		OK(ibv_query_gid(ctx, 1, i, &gid));
		OK(ibv_query_gid_ex(ctx, 1, i, &entry, 0));
		EQ(memcmp(&gid, &entry.gid, sizeof gid), 0);
		struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = i, .hop_limit = 64 } };
		OK(ibv_query_gid(ctx, 1, carries, &attr.grh.dgid));
		struct ibv_qp *qp = make(IBV_QPT_RC, SMALL);
		TRUE(qp != NULL);
		struct ibv_qp_attr to = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
		OK(ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		to = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num, .ah_attr = attr };
		int rtr = ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
							IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
		EQ(rtr, i == carries ? 0 : EOPNOTSUPP);
		if (i != carries)
			IS_NULL(ibv_create_ah(pd, &attr), EOPNOTSUPP);
		OK(ibv_destroy_qp(qp));
	}
	REFUSES(ibv_query_gid_ex(ctx, 1, count, &entry, 0), ENODATA);
	OK(ibv_query_gid_ex(ctx, 1, carries, &entry, 0));
	EQ(entry.gid_type, IBV_GID_TYPE_ROCE_V2);
	struct ibv_gid_entry all[16];
	EQ(ibv_query_gid_table(ctx, all, 16, 0), count);
}

static void mlx5(void)
{
	struct ibv_device_attr attr;
	OK(ibv_query_device(ctx, &attr));
	EQ(attr.vendor_id, 0x02c9);
	EQ(attr.vendor_part_id, 4125);
	EQ(attr.max_sge, 30);
	EQ(attr.max_qp_init_rd_atom, 16);
	EQ(strcmp(attr.fw_ver, "22.38.1900"), 0);
	char board[64];
	TRUE(ibv_read_sysfs_file(ctx->device->ibdev_path, "board_id", board, sizeof board) > 0);
	EQ(strcmp(board, "MT_0000000436"), 0);
	EQ(be64toh(ibv_get_device_guid(ctx->device)) >> 40, 0xb8cef6);
	EQ(attr.node_guid, ibv_get_device_guid(ctx->device));
	struct ibv_port_attr port;
	OK(ibv_query_port(ctx, 1, &port));
	EQ(port.lid, 0);
	EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
	gids(3, 4);
	struct ibv_gid_entry entry;
	for (int i = 0; i < 4; i++) {
		OK(ibv_query_gid_ex(ctx, 1, i, &entry, 0));
		EQ(entry.gid_type, i % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1);
	}
	IS_NULL(make(IBV_QPT_RC, (struct ibv_qp_cap){ .max_send_wr = 1, .max_send_sge = 31 }), EINVAL);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	TRUE(srq != NULL);
	OK(ibv_destroy_srq(srq));
}

static void irdma(void)
{
	struct ibv_device_attr_ex attr;
	OK(ibv_query_device_ex(ctx, NULL, &attr));
	EQ(attr.orig_attr.vendor_id, 0x8086);
	EQ(attr.orig_attr.max_srq, 0);
	EQ(attr.orig_attr.atomic_cap, IBV_ATOMIC_NONE);
	EQ(attr.odp_caps.general_caps, 0);
	EQ(attr.tm_caps.max_num_tags, 0);
	EQ(attr.max_dm_size, 0);
	EQ(attr.orig_attr.device_cap_flags & IBV_DEVICE_XRC, 0);
	gids(1, 2);

	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	IS_NULL(ibv_create_srq(pd, &srq), EOPNOTSUPP);
	IS_NULL(make(IBV_QPT_UC, SMALL), EOPNOTSUPP);
	IS_NULL(ibv_open_xrcd(ctx, &(struct ibv_xrcd_init_attr){ .comp_mask = 3, .fd = -1, .oflags = 0100 }), EOPNOTSUPP);
	IS_NULL(ibv_alloc_dm(ctx, &(struct ibv_alloc_dm_attr){ .length = 64 }), EOPNOTSUPP);
	static char buf[64];
	IS_NULL(ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
	/* UCX asks for the right on every device; hardware without atomics gives it. */
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	TRUE(mr != NULL);

	/* Inline data up to the limit, which is no multiple of anything. */
	struct ibv_qp_cap cap = SMALL;
	cap.max_inline_data = 102;
	IS_NULL(make(IBV_QPT_RC, cap), EINVAL);
	cap.max_inline_data = 101;
	struct ibv_qp *qp = make(IBV_QPT_RC, cap), *ud = make(IBV_QPT_UD, SMALL);
	TRUE(qp != NULL && ud != NULL);

	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD }, *bad = NULL;
	EQ(ibv_post_send(qp, &wr, &bad), EOPNOTSUPP);
	TRUE(bad == &wr);
	struct ibv_qp_init_attr_ex ex = { .send_cq = cq, .recv_cq = cq, .cap = SMALL, .qp_type = IBV_QPT_RC, .pd = pd,
					  .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					  .send_ops_flags = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD };
	IS_NULL(ibv_create_qp_ex(ctx, &ex), EOPNOTSUPP);
	ex.send_ops_flags = IBV_QP_EX_WITH_SEND;
	TRUE(ibv_create_qp_ex(ctx, &ex) != NULL);
}

static void rxe(void)
{
	struct ibv_device_attr attr;
	OK(ibv_query_device(ctx, &attr));
	EQ(attr.vendor_id, 0);
	EQ(attr.max_srq, 960);
	EQ(attr.max_cqe, 32767);
	IS_NULL(ibv_create_cq(ctx, 32768, NULL, NULL, 0), EINVAL);
	/* Room for elements is room for inline data elsewhere, but never more than the limit. */
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { .max_send_wr = 1, .max_send_sge = 32 }, .qp_type = IBV_QPT_RC };
	TRUE(ibv_create_qp(pd, &init) != NULL);
	EQ(init.cap.max_inline_data, 400);
}

static void mana(void)
{
	IS_NULL(make(IBV_QPT_UD, SMALL), EOPNOTSUPP);
	IS_NULL(ibv_alloc_mw(pd, IBV_MW_TYPE_1), EOPNOTSUPP);
	TRUE(make(IBV_QPT_RC, SMALL) != NULL);
}

/* A device of unreliable connections alone. */
static void uc(void)
{
	struct ibv_device_attr_ex attr;
	OK(ibv_query_device_ex(ctx, NULL, &attr));
	EQ(attr.packet_pacing_caps.supported_qpts, 1 << IBV_QPT_UC);
	EQ(attr.odp_caps.per_transport_caps.rc_odp_caps, 0);
	TRUE(attr.odp_caps.per_transport_caps.uc_odp_caps != 0);
	EQ(attr.tm_caps.max_num_tags, 0);
	IS_NULL(make(IBV_QPT_RC, SMALL), EOPNOTSUPP);
	struct ibv_qp_init_attr_ex ex = { .send_cq = cq, .recv_cq = cq, .cap = SMALL, .qp_type = IBV_QPT_RC, .pd = pd,
					  .comp_mask = IBV_QP_INIT_ATTR_PD };
	IS_NULL(ibv_create_qp_ex(ctx, &ex), EOPNOTSUPP);
	IS_NULL(make(IBV_QPT_UD, SMALL), EOPNOTSUPP);
	struct end a = make_end(pd, IBV_QPT_UC), b = make_end(pd, IBV_QPT_UC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 64));
	OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
}

int main(int argc, char **argv)
{
	EQ(argc, 2);
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	TRUE(pd != NULL && cq != NULL);
	const struct { const char *persona, *device; void (*test)(void); } tests[] = {
		{ "mlx5", "mlx5_0", mlx5 }, { "irdma", "irdma0", irdma }, { "rxe", "rxe0", rxe }, { "mana", "mana_0", mana },
		{ "uc", "uc0", uc },
	};
	for (unsigned i = 0; i < sizeof tests / sizeof *tests; i++)
		if (!strcmp(argv[1], tests[i].persona)) {
			EQ(strcmp(ibv_get_device_name(ctx->device), tests[i].device), 0);
			tests[i].test();
			return 0;
		}
	return 1;
}
