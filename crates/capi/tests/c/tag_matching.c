/* Tag matching: eager and rendezvous messages, unexpected ones and how program and device agree about them, bad input. */
#include "check.h"
#include <infiniband/tm_types.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_srq *srq;
static struct ibv_cq_ex *cq;
/* `peer` sends to `tm`, whose receives are the SRQ's. */
static struct end peer;
static struct ibv_qp *tm;
static char *buf;
static struct ibv_mr *mr;

struct done {
	uint64_t wr_id, tag;
	uint32_t priv, byte_len, qp_num;
	enum ibv_wc_status status;
	enum ibv_wc_opcode opcode;
	unsigned int flags;
};

static struct done next(void)
{
	struct ibv_poll_cq_attr attr = { 0 };
	double until = now() + 10;
	int ret;
	while ((ret = ibv_start_poll(cq, &attr)) == ENOENT)
		TRUE(now() < until);
	EQ(ret, 0);
	struct ibv_wc_tm_info info;
	ibv_wc_read_tm_info(cq, &info);
	struct done d = { cq->wr_id, info.tag, info.priv, ibv_wc_read_byte_len(cq), ibv_wc_read_qp_num(cq), cq->status,
		ibv_wc_read_opcode(cq), ibv_wc_read_wc_flags(cq) };
	ibv_end_poll(cq);
	return d;
}

static void expect(uint64_t wr_id, enum ibv_wc_opcode opcode, unsigned int flags, uint64_t tag)
{
	struct done d = next();
	EQ(d.wr_id, wr_id);
	EQ(d.status, IBV_WC_SUCCESS);
	EQ(d.opcode, opcode);
	EQ(d.flags, flags);
	EQ(d.tag, tag);
	EQ(d.priv, tag ? 0xabc : 0);
}

static uint32_t add(uint64_t wr_id, uint64_t tag, uint64_t mask, size_t at, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buf + at, .length = len, .lkey = mr->lkey };
	struct ibv_ops_wr wr = { .wr_id = wr_id + 1000, .opcode = IBV_WR_TAG_ADD, .flags = IBV_OPS_SIGNALED,
		.tm.add = { .recv_wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .tag = tag, .mask = mask } }, *bad = NULL;
	OK(ibv_post_srq_ops(srq, &wr, &bad));
	return wr.tm.handle;
}

static int del(uint64_t wr_id, uint32_t handle)
{
	struct ibv_ops_wr wr = { .wr_id = wr_id, .opcode = IBV_WR_TAG_DEL, .tm.handle = handle }, *bad;
	return ibv_post_srq_ops(srq, &wr, &bad);
}

static void sync_with(uint32_t count, unsigned int flags)
{
	struct ibv_ops_wr wr = { .wr_id = 27, .opcode = IBV_WR_TAG_SYNC, .flags = IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC,
		.tm.unexpected_cnt = count }, *bad;
	OK(ibv_post_srq_ops(srq, &wr, &bad));
	expect(27, IBV_WC_TM_SYNC, flags, 0);
}

static void receive(uint64_t wr_id, size_t at)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buf + at, .length = 4096, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
}

/* Sends a message of `len` bytes with its header. */
static void message(uint8_t op, uint64_t tag, uint32_t len)
{
	struct ibv_tmh tmh = { .opcode = op, .app_ctx = htobe32(0xabc), .tag = htobe64(tag) };
	memcpy(peer.buf, &tmh, sizeof(tmh));
	OK(post_send(&peer, 5, len, IBV_SEND_SIGNALED));
	struct ibv_wc wc = poll_one(peer.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
}

static void rendezvous(uint64_t tag, size_t at, uint32_t len)
{
	struct ibv_rvh rvh = { .va = htobe64((uintptr_t)peer.buf + at), .rkey = htobe32(peer.mr->rkey), .len = htobe32(len) };
	memcpy(peer.buf + sizeof(struct ibv_tmh), &rvh, sizeof(rvh));
	message(IBV_TMH_RNDV, tag, 40);
}

static void make(void)
{
	struct ibv_device_attr_ex caps;
	OK(ibv_query_device_ex(ctx, NULL, &caps));
	TRUE(caps.tm_caps.flags & IBV_TM_CAP_RC);
	TRUE(caps.tm_caps.max_rndv_hdr_size >= 32 && caps.tm_caps.max_num_tags && caps.tm_caps.max_sge);
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO };
	cq = ibv_create_cq_ex(ctx, &cq_attr);
	TRUE(cq != NULL);
	struct ibv_srq_init_attr_ex a = { .attr = { .max_wr = 16, .max_sge = 1 }, .srq_type = IBV_SRQT_TM, .pd = pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
		.cq = ibv_cq_ex_to_cq(cq), .tm_cap = { .max_num_tags = 4, .max_ops = 4 } };
	struct ibv_srq_init_attr_ex bad = a;
	bad.comp_mask &= ~IBV_SRQ_INIT_ATTR_TM;
	IS_NULL(ibv_create_srq_ex(ctx, &bad), EINVAL);
	bad = a, bad.tm_cap.max_num_tags = caps.tm_caps.max_num_tags + 1;
	IS_NULL(ibv_create_srq_ex(ctx, &bad), EINVAL);
	bad = a, bad.tm_cap.max_num_tags = 0;
	IS_NULL(ibv_create_srq_ex(ctx, &bad), EINVAL);
	bad = a, bad.cq = NULL;
	IS_NULL(ibv_create_srq_ex(ctx, &bad), EINVAL);
	srq = ibv_create_srq_ex(ctx, &a);
	TRUE(srq != NULL);
	REFUSES(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), EBUSY);

	/* Only a reliable connection whose sends are the device's. */
	struct ibv_qp_init_attr init = { .send_cq = peer.cq, .recv_cq = peer.cq, .srq = srq, .qp_type = IBV_QPT_UD };
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.qp_type = IBV_QPT_RC, init.cap.max_send_wr = 1;
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.cap.max_send_wr = 0;
	tm = ibv_create_qp(pd, &init);
	TRUE(tm != NULL);
	struct end e = { .qp = tm };
	connect_ends(&peer, &e);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad_wr;
	REFUSES(ibv_post_send(tm, &wr, &bad_wr), EINVAL);
}

static void eager(void)
{
	for (int i = 0; i < 10000; i++)
		peer.buf[16 + i] = i * 7;
	add(1, 0x11, 0xff, 0, 100);
	expect(1001, IBV_WC_TM_ADD, 0, 0);
	add(2, 0x20, 0xf0, 8192, 16384);
	expect(1002, IBV_WC_TM_ADD, 0, 0);
	message(IBV_TMH_EAGER, 0xf11, 66);
	struct done d = next();
	EQ(d.wr_id, 1);
	EQ(d.opcode, IBV_WC_TM_RECV);
	EQ(d.flags, IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID);
	EQ(d.byte_len, 50);
	EQ(d.qp_num, tm->qp_num);
	TRUE(d.tag == 0xf11 && d.priv == 0xabc);
	EQ(memcmp(buf, peer.buf + 16, 50), 0);
	/* Many packets: the match first, the data later. */
	message(IBV_TMH_EAGER, 0x25, 10016);
	expect(2, IBV_WC_TM_RECV, IBV_WC_TM_MATCH, 0x25);
	d = next();
	EQ(d.wr_id, 2);
	EQ(d.flags, IBV_WC_TM_DATA_VALID);
	EQ(d.byte_len, 10000);
	EQ(memcmp(buf + 8192, peer.buf + 16, 10000), 0);
}

static void unexpected(void)
{
	receive(50, 4096), receive(51, 4096), receive(52, 4096);
	/* To the program, whole; no tag, no count. */
	message(IBV_TMH_NO_TAG, 0x77, 20);
	expect(50, IBV_WC_TM_NO_TAG, 0, 0);
	EQ(memcmp(buf + 4096, peer.buf, 20), 0);
	message(IBV_TMH_FIN, 0x77, 32);
	expect(51, IBV_WC_TM_NO_TAG, 0, 0);
	message(IBV_TMH_EAGER, 0x77, 1000);
	struct done d = next();
	EQ(d.wr_id, 52);
	EQ(d.opcode, IBV_WC_TM_RECV);
	EQ(d.flags, 0);
	EQ(d.byte_len, 1000);
	EQ(memcmp(buf + 4096, peer.buf, 1000), 0);
	/* Until the program has seen it, new tags wait; a message for one is unexpected, too. */
	uint32_t handle = add(3, 0x78, ~0ull, 0, 100);
	expect(1003, IBV_WC_TM_ADD, IBV_WC_TM_SYNC_REQ, 0);
	receive(53, 4096);
	message(IBV_TMH_EAGER, 0x78, 30);
	expect(53, IBV_WC_TM_RECV, 0, 0);
	sync_with(1, IBV_WC_TM_SYNC_REQ);
	sync_with(2, 0);
	/* It took the message itself: the tag has to go. */
	OK(del(6, handle));
	OK(del(7, handle));
	d = next();
	EQ(d.wr_id, 7);
	EQ(d.opcode, IBV_WC_TM_DEL);
	EQ(d.status, IBV_WC_TM_ERR);
}

static void rndv(void)
{
	memset(buf, 0, 32768);
	for (int i = 0; i < 20000; i++)
		peer.buf[8192 + i] = i * 13;
	add(8, 0x88, ~0ull, 0, 20000);
	expect(1008, IBV_WC_TM_ADD, 0, 0);
	OK(post_recv(&peer, 9, 100));
	rendezvous(0x88, 8192, 20000);
	expect(8, IBV_WC_TM_RECV, IBV_WC_TM_MATCH, 0x88);
	struct done d = next();
	EQ(d.wr_id, 8);
	EQ(d.opcode, IBV_WC_TM_RECV);
	EQ(d.flags, IBV_WC_TM_DATA_VALID);
	EQ(d.byte_len, 20000);
	EQ(memcmp(buf, peer.buf + 8192, 20000), 0);
	/* The sender is told that its buffer is free. */
	struct ibv_wc wc = poll_one(peer.cq);
	TRUE(wc.opcode == IBV_WC_RECV && wc.wr_id == 9 && wc.byte_len == 32);
	struct ibv_tmh *fin = (void *)peer.buf;
	EQ(fin->opcode, IBV_TMH_FIN);
	EQ(be64toh(fin->tag), 0x88);
	struct ibv_rvh *rvh = (void *)(fin + 1);
	EQ(be32toh(rvh->len), 20000);

	/* Too long for its buffer: the program fetches it, and finds the headers there. */
	add(10, 0x8a, ~0ull, 0, 64);
	expect(1010, IBV_WC_TM_ADD, 0, 0);
	rendezvous(0x8a, 8192, 65);
	d = next();
	EQ(d.wr_id, 10);
	EQ(d.status, IBV_WC_TM_RNDV_INCOMPLETE);
	EQ(d.tag, 0x8a);
	EQ(be32toh(((struct ibv_rvh *)(buf + 16))->len), 65);
	/* Nobody waits for it. */
	receive(54, 4096);
	rendezvous(0x8b, 8192, 10);
	expect(54, IBV_WC_TM_RECV, 0, 0);
	sync_with(3, 0);
}

static void bad_input(void)
{
	struct ibv_ops_wr wr = { .opcode = 3 }, *bad = NULL;
	REFUSES(ibv_post_srq_ops(srq, &wr, &bad), EINVAL);
	TRUE(bad == &wr);
	wr.opcode = IBV_WR_TAG_SYNC, wr.flags = 4;
	REFUSES(ibv_post_srq_ops(srq, &wr, &bad), EINVAL);
	wr = (struct ibv_ops_wr){ .opcode = IBV_WR_TAG_ADD, .tm.add.num_sge = 1 };
	REFUSES(ibv_post_srq_ops(srq, &wr, &bad), EINVAL);
	wr.tm.add.num_sge = -1;
	REFUSES(ibv_post_srq_ops(srq, &wr, &bad), EINVAL);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *basic = ibv_create_srq(pd, &init);
	wr = (struct ibv_ops_wr){ .opcode = IBV_WR_TAG_SYNC };
	REFUSES(ibv_post_srq_ops(basic, &wr, &bad), EINVAL);
	OK(ibv_destroy_srq(basic));
	/* The list is full: the fifth is refused. */
	struct ibv_ops_wr list[5];
	for (int i = 0; i < 5; i++)
		list[i] = (struct ibv_ops_wr){ .opcode = IBV_WR_TAG_ADD, .next = i < 4 ? &list[i + 1] : NULL,
			.tm.add = { .tag = 0x900 + i, .mask = ~0ull } };
	REFUSES(ibv_post_srq_ops(srq, list, &bad), ENOMEM);
	TRUE(bad == &list[4]);
	/* A message that does not fit ends both ends. */
	OK(del(1, list[0].tm.handle));
	add(60, 0x960, ~0ull, 0, 10);
	expect(1060, IBV_WC_TM_ADD, 0, 0);
	struct ibv_tmh tmh = { .opcode = IBV_TMH_EAGER, .tag = htobe64(0x960) };
	memcpy(peer.buf, &tmh, sizeof(tmh));
	OK(post_send(&peer, 61, 16 + 11, IBV_SEND_SIGNALED));
	EQ(poll_one(peer.cq).status, IBV_WC_REM_INV_REQ_ERR);
	struct done d = next();
	EQ(d.wr_id, 60);
	EQ(d.status, IBV_WC_LOC_LEN_ERR);
}

int main(void)
{
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	buf = calloc(1, BUF);
	mr = ibv_reg_mr(pd, buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	peer = make_end(pd, IBV_QPT_RC);
	make();
	eager();
	unexpected();
	rndv();
	bad_input();
	OK(ibv_destroy_qp(tm));
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	free_end(&peer);
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
