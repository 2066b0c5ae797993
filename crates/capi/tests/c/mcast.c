/* Multicast groups: S5.10, and S1.5: a QP that is attached is not destroyed. */
#include "check.h"

#include <arpa/inet.h>

static const uint32_t QKEY = 0x11111111;

static union ibv_gid group(uint32_t n)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 77, [14] = n >> 8, [15] = n } };
	return gid;
}

static struct end datagram_end(struct ibv_pd *pd, int create_flags)
{
	struct end e = make_end(pd, IBV_QPT_UD);
	OK(ibv_destroy_qp(e.qp));
	struct ibv_qp_init_attr_ex init = {
		.send_cq = e.cq,
		.recv_cq = e.cq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
		.pd = pd,
		.create_flags = create_flags,
	};
	e.qp = ibv_create_qp_ex(pd->context, &init);
	TRUE(e.qp != NULL);
	to_init(e.qp), to_rtr(e.qp, 0), to_rts(e.qp);
	return e;
}

static struct ibv_ah *group_ah(struct ibv_pd *pd, union ibv_gid gid)
{
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 9 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &a);
	TRUE(ah != NULL);
	return ah;
}

/* Sends `n` as immediate data to the group, and waits for the send. */
static void tell(struct end *from, struct ibv_ah *ah, uint32_t n)
{
	struct ibv_send_wr wr = { .wr_id = 1000 + n, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(n), .send_flags = IBV_SEND_SIGNALED };
	wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = 0xffffff, wr.wr.ud.remote_qkey = QKEY;
	struct ibv_send_wr *bad;
	OK(ibv_post_send(from->qp, &wr, &bad));
}

/* The next datagram is `n`, so nothing came before it. Receives and sends complete on one CQ: `own` says whether a send does, too. */
static struct ibv_wc hears(struct end *e, uint32_t n, uint32_t from, bool own)
{
	struct ibv_wc wc = { 0 };
	for (int left = own ? 2 : 1; left > 0; left--) {
		struct ibv_wc got = poll_one(e->cq);
		EQ(got.status, IBV_WC_SUCCESS);
		if (got.opcode == IBV_WC_SEND)
			EQ(got.wr_id, 1000 + n);
		else
			wc = got;
	}
	EQ(wc.opcode, IBV_WC_RECV);
	EQ(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), n);
	EQ(wc.byte_len, 40);
	EQ(wc.src_qp, from);
	EQ(wc.qp_num, e->qp->qp_num);
	OK(post_recv(e, n, 64));
	return wc;
}

static void sent(struct end *e, uint32_t n)
{
	struct ibv_wc wc = poll_one(e->cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_SEND);
	EQ(wc.wr_id, 1000 + n);
}

static void delivery(struct ibv_pd *pd)
{
	struct end a = datagram_end(pd, 0), b = datagram_end(pd, 0), c = datagram_end(pd, IBV_QP_CREATE_BLOCK_SELF_MCAST_LB);
	struct end *all[] = { &a, &b, &c };
	union ibv_gid gid = group(1), other = group(2);
	struct ibv_ah *ah = group_ah(pd, gid), *other_ah = group_ah(pd, other);
	for (int i = 0; i < 3; i++) {
		OK(ibv_attach_mcast(all[i]->qp, &gid, 0xc001));
		OK(ibv_attach_mcast(all[i]->qp, &gid, 0xc001));
		for (int j = 0; j < 4; j++)
			OK(post_recv(all[i], j, 64));
	}

	/* One copy each, the sender's own too; and none of another group. */
	tell(&a, other_ah, 1), sent(&a, 1);
	tell(&a, ah, 2), hears(&a, 2, a.qp->qp_num, true), hears(&b, 2, a.qp->qp_num, false);
	struct ibv_wc wc = hears(&c, 2, a.qp->qp_num, false);
	EQ(memcmp(c.buf + 36, gid.raw + 12, 4), 0);
	EQ((uint8_t)c.buf[28], 9);
	struct ibv_ah *back = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)c.buf, 1);
	TRUE(back != NULL);
	OK(ibv_destroy_ah(back));

	/* But not where the QP was made without. */
	tell(&c, ah, 3), sent(&c, 3), hears(&a, 3, c.qp->qp_num, false), hears(&b, 3, c.qp->qp_num, false);
	tell(&b, ah, 4), hears(&b, 4, b.qp->qp_num, true), hears(&a, 4, b.qp->qp_num, false), hears(&c, 4, b.qp->qp_num, false);

	/* After detach no copy arrives. */
	OK(ibv_detach_mcast(b.qp, &gid, 0xc001));
	REFUSES(ibv_detach_mcast(b.qp, &gid, 0xc001), EINVAL);
	tell(&a, ah, 5), hears(&a, 5, a.qp->qp_num, true), hears(&c, 5, a.qp->qp_num, false);
	OK(ibv_attach_mcast(b.qp, &gid, 0));
	tell(&a, ah, 6), hears(&a, 6, a.qp->qp_num, true), hears(&b, 6, a.qp->qp_num, false), hears(&c, 6, a.qp->qp_num, false);

	/* S1.5: neither is the QP destroyed, nor does it lose its groups. */
	OK(ibv_attach_mcast(b.qp, &other, 0));
	REFUSES(ibv_destroy_qp(b.qp), EBUSY);
	tell(&b, ah, 7), hears(&a, 7, b.qp->qp_num, false), hears(&b, 7, b.qp->qp_num, true), hears(&c, 7, b.qp->qp_num, false);
	tell(&a, other_ah, 8), sent(&a, 8), hears(&b, 8, a.qp->qp_num, false);
	OK(ibv_detach_mcast(b.qp, &gid, 0));
	REFUSES(ibv_destroy_qp(b.qp), EBUSY);
	OK(ibv_detach_mcast(b.qp, &other, 0));
	OK(ibv_detach_mcast(a.qp, &gid, 0xc001));
	OK(ibv_detach_mcast(c.qp, &gid, 0xc001));

	OK(ibv_destroy_ah(ah));
	OK(ibv_destroy_ah(other_ah));
	for (int i = 0; i < 3; i++)
		free_end(all[i]);
}

static void refusals(struct ibv_pd *pd)
{
	struct end rc = make_end(pd, IBV_QPT_RC), uc = make_end(pd, IBV_QPT_UC), ud = make_end(pd, IBV_QPT_UD);
	union ibv_gid gid = group(3), unicast = own_gid(pd->context), zero = { 0 };
	REFUSES(ibv_attach_mcast(rc.qp, &gid, 0), EINVAL);
	REFUSES(ibv_attach_mcast(uc.qp, &gid, 0), EINVAL);
	REFUSES(ibv_detach_mcast(rc.qp, &gid, 0), EINVAL);
	REFUSES(ibv_attach_mcast(ud.qp, &unicast, 0), EINVAL);
	REFUSES(ibv_attach_mcast(ud.qp, &zero, 0), EINVAL);
	REFUSES(ibv_attach_mcast(ud.qp, NULL, 0), EINVAL);
	REFUSES(ibv_detach_mcast(ud.qp, NULL, 0), EINVAL);
	REFUSES(ibv_detach_mcast(ud.qp, &gid, 0), EINVAL);
	/* The LID is part of what was attached. */
	OK(ibv_attach_mcast(ud.qp, &gid, 5));
	REFUSES(ibv_detach_mcast(ud.qp, &gid, 6), EINVAL);
	REFUSES(ibv_destroy_qp(ud.qp), EBUSY);
	OK(ibv_detach_mcast(ud.qp, &gid, 5));

	/* Only datagram QPs have copies to block. */
	struct ibv_qp_init_attr_ex init = { .send_cq = rc.cq, .recv_cq = rc.cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
		.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB };
	IS_NULL(ibv_create_qp_ex(pd->context, &init), EINVAL);
	/* A group is reached by a global route. */
	struct ibv_ah_attr a = { .port_num = 1, .dlid = 0xc001, .grh = { .dgid = gid } };
	IS_NULL(ibv_create_ah(pd, &a), EINVAL);
	free_end(&rc), free_end(&uc), free_end(&ud);
}

static void limits(struct ibv_pd *pd)
{
	struct ibv_device_attr dev;
	OK(ibv_query_device(pd->context, &dev));
	TRUE(dev.max_mcast_grp > 0 && dev.max_mcast_qp_attach > 0);
	TRUE(dev.max_total_mcast_qp_attach >= dev.max_mcast_grp);
	struct end e = make_end(pd, IBV_QPT_UD);
	union ibv_gid gid;
	for (int i = 0; i < dev.max_mcast_grp; i++) {
		gid = group(i);
		OK(ibv_attach_mcast(e.qp, &gid, 0));
	}
	gid = group(dev.max_mcast_grp);
	REFUSES(ibv_attach_mcast(e.qp, &gid, 0), ENOMEM);
	for (int i = 0; i < dev.max_mcast_grp; i++) {
		gid = group(i);
		OK(ibv_detach_mcast(e.qp, &gid, 0));
	}
	gid = group(0);
	int n = dev.max_mcast_qp_attach;
	struct ibv_qp **qps = calloc(n + 1, sizeof *qps);
	for (int i = 0; i <= n; i++) {
		qps[i] = make_qp(pd, e.cq, IBV_QPT_UD, NULL, 0);
		if (i < n)
			OK(ibv_attach_mcast(qps[i], &gid, 0));
		else
			REFUSES(ibv_attach_mcast(qps[i], &gid, 0), ENOMEM);
	}
	for (int i = 0; i <= n; i++) {
		if (i < n)
			OK(ibv_detach_mcast(qps[i], &gid, 0));
		OK(ibv_destroy_qp(qps[i]));
	}
	free(qps);
	free_end(&e);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	refusals(pd);
	delivery(pd);
	limits(pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
