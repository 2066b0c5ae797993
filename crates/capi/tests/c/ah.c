/* Address handles: S3.1, S3.2, S3.3. */
#include "check.h"

static const uint32_t QKEY = 0x11111111;

static struct ibv_ah_attr valid(struct ibv_context *ctx)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx), .hop_limit = 64 } };
	return attr;
}

/* S3.1 */
static void refused(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_ah_attr attr = valid(ctx);
	attr.port_num = 0;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	attr.port_num = 2;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	attr = valid(ctx);
	attr.grh.sgid_index = 250;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	attr = valid(ctx);
	attr.is_global = 0;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	IS_NULL(ibv_create_ah(pd, NULL), EINVAL);
	IS_NULL(ibv_create_ah(NULL, &attr), EINVAL);
}

static void send(struct end *from, struct end *to, struct ibv_ah *ah, uint64_t wr_id)
{
	struct ibv_sge sge = { (uintptr_t)from->buf, 64, from->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id,
				  .sg_list = &sge,
				  .num_sge = 1,
				  .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.ud = { .ah = ah, .remote_qpn = to->qp->qp_num, .remote_qkey = QKEY } },
			   *bad;
	OK(ibv_post_send(from->qp, &wr, &bad));
}

static void receive(struct end *end)
{
	struct ibv_sge sge = { (uintptr_t)end->buf + 1024, 1024, end->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_recv(end->qp, &wr, &bad));
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	refused(ctx, pd);

	struct end a = make_end(pd, IBV_QPT_UD), b = make_end(pd, IBV_QPT_UD);
	to_init(a.qp), to_init(b.qp), to_rtr(a.qp, 0), to_rtr(b.qp, 0), to_rts(a.qp), to_rts(b.qp);
	struct ibv_ah_attr attr = valid(ctx);

	/* S3.2: a posted send holds what it needs. */
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);
	TRUE(ah != NULL);
	receive(&b);
	send(&a, &b, ah, 1);
	OK(ibv_destroy_ah(ah));
	struct ibv_wc wc = poll_one(a.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.byte_len, 64 + 40);
	/* Which headers are in front of the data (UCX drops what does not say so), not a service level for the answer. */
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	EQ(wc.sl, memcmp(attr.grh.dgid.raw, mapped, sizeof mapped) ? 9 : 10);
	struct ibv_ah_attr answer;
	OK(ibv_init_ah_from_wc(ctx, 1, &wc, (struct ibv_grh *)(b.buf + 1024), &answer));
	EQ(answer.sl, 0);

	/* S3.1: the answer goes back by the handle that is made of the completion and the GRH in front of the data. */
	struct ibv_ah *back = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)(b.buf + 1024), 1);
	TRUE(back != NULL);
	receive(&a);
	send(&b, &a, back, 2);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);

	/* S3.3, one way: nothing is left to wait for. */
	OK(ibv_destroy_ah(back));

	/* The other: sends that wait (the peer has posted no receive) are flushed by ERR, and every one completes. */
	ah = ibv_create_ah(pd, &attr);
	TRUE(ah != NULL);
	for (uint64_t i = 0; i < 4; i++)
		send(&a, &b, ah, i);
	to_err(a.qp);
	for (uint64_t i = 0; i < 4; i++) {
		wc = poll_one(a.cq);
		EQ(wc.wr_id, i);
		TRUE(wc.status == IBV_WC_WR_FLUSH_ERR || wc.status == IBV_WC_SUCCESS);
	}
	OK(ibv_destroy_ah(ah));
	OK(ibv_destroy_qp(a.qp));
	OK(ibv_destroy_qp(b.qp));
	OK(ibv_dereg_mr(a.mr));
	OK(ibv_dereg_mr(b.mr));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
