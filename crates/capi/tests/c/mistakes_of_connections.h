/* Programs of mistakes.c whose two ends of a connection do not fit. */

/* The values that the program sets at the two ends. */
struct numbers {
	uint32_t dest_qp_num, rq_psn, sq_psn;
	enum ibv_mtu path_mtu;
};

static void connect_by(struct ibv_qp *qp, struct numbers n)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	to_init(qp);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = n.path_mtu, .dest_qp_num = n.dest_qp_num,
		.rq_psn = n.rq_psn, .max_dest_rd_atomic = 4, .min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(qp->context), .hop_limit = 64 } } };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = n.sq_psn, .timeout = 8, .retry_cnt = 1, .rnr_retry = 7,
		.max_rd_atomic = 4 };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					    IBV_QP_MAX_QP_RD_ATOMIC));
}

static void connect_by_all(struct end *a, struct numbers of_a, struct end *b, struct numbers of_b)
{
	of_a.dest_qp_num = b->qp->qp_num, of_b.dest_qp_num = a->qp->qp_num;
	connect_by(a->qp, of_a), connect_by(b->qp, of_b);
}

static const struct numbers ORDINARY = { .rq_psn = 200, .sq_psn = 100, .path_mtu = IBV_MTU_512 };

/* The receiver waits for the second PSN of the sender: the SEND counts as a duplicate, succeeds, and is lost. */
static void ends_differ(struct end *a, struct end *b)
{
	struct numbers of_b = ORDINARY;
	of_b.rq_psn = wrong ? 101 : 100, of_b.sq_psn = 200;
	connect_by_all(a, ORDINARY, b, of_b);
	OK(post_recv(b, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
	if (!wrong)
		OK(status_of_next(b));
	OK(ibv_destroy_qp(b->qp));
	b->qp = make_qp(a->mr->pd, b->cq, IBV_QPT_RC, NULL, 0);
}

/* The receiver waits for a PSN before all that come. */
static void ends_differ_in_psn(struct end *a, struct end *b)
{
	struct numbers of_b = ORDINARY;
	of_b.rq_psn = wrong ? 95 : 100, of_b.sq_psn = 200;
	connect_by_all(a, ORDINARY, b, of_b);
	OK(post_recv(b, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	EQ(status_of_next(a), wrong ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS);
}

static void ends_differ_in_mtu(struct end *a, struct end *b)
{
	struct numbers of_b = ORDINARY;
	of_b.rq_psn = 100, of_b.sq_psn = 200;
	of_b.path_mtu = wrong ? IBV_MTU_256 : IBV_MTU_512;
	connect_by_all(a, ORDINARY, b, of_b);
	OK(post_recv(b, 1, 4096));
	OK(send_some(a, 2, 4096, IBV_SEND_SIGNALED));
	EQ(status_of_next(a), wrong ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_SUCCESS);
}

/* Two connections. Wrong: those who begin have exchanged the numbers of the two that answer. */
static void ends_differ_in_numbers(struct end *a, struct end *b)
{
	struct end a2 = make_end(a->mr->pd, IBV_QPT_RC), b2 = make_end(a->mr->pd, IBV_QPT_RC);
	struct numbers of_b = ORDINARY;
	of_b.rq_psn = 100, of_b.sq_psn = 200;
	connect_by_all(a, ORDINARY, b, of_b), connect_by_all(&a2, ORDINARY, &b2, of_b);
	if (wrong) {
		struct numbers crossed = ORDINARY;
		crossed.dest_qp_num = b2.qp->qp_num;
		connect_by(a->qp, crossed);
		crossed.dest_qp_num = b->qp->qp_num;
		connect_by(a2.qp, crossed);
	}
	struct end *both[2] = { a, &a2 };
	OK(post_recv(b, 1, 64) || post_recv(&b2, 1, 64));
	for (int n = 0; n < 2; n++) {
		OK(post_send(both[n], 2, 8, IBV_SEND_SIGNALED));
		struct ibv_wc wc = poll_one(both[n]->cq);
		EQ(wc.status, wrong ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS);
		EQ(wc.vendor_err, wrong ? 1210 : 0);
	}
	free_end(&a2), free_end(&b2);
}
