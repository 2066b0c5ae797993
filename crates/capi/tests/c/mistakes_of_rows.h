/* Programs of mistakes.c that break the rows of the extended calls. */

static void extended_calls_out_of_order(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq_init_attr_ex attr = { .cqe = 8 };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(a->cq->context, &attr);
	struct ibv_poll_cq_attr poll = { 0 };
	EQ(ibv_start_poll(cq, &poll), ENOENT);
	if (wrong)
		ibv_end_poll(cq);
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

/* A queue pair with the extended calls, whose receives lie flushed in an extended completion queue. */
static struct end in_row(struct end *a, uint64_t wc_flags)
{
	struct end e = *a;
	struct ibv_cq_init_attr_ex attr = { .cqe = 8, .wc_flags = wc_flags };
	e.cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(a->cq->context, &attr));
	struct ibv_qp_init_attr_ex init = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RC, .pd = a->mr->pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	e.qp = ibv_create_qp_ex(a->cq->context, &init);
	TRUE(e.cq && e.qp);
	to_init(e.qp);
	OK(post_recv(&e, 1, 8) || post_recv(&e, 2, 8));
	to_err(e.qp);
	return e;
}

/* Wrong: each row begins twice, and does not end. */
static void rows_not_ended(struct end *a, struct end *b)
{
	(void)b;
	struct end e = in_row(a, 0);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e.qp);
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)e.cq;
	struct ibv_poll_cq_attr poll = { 0 };
	ibv_wr_start(qp);
	if (!wrong)
		ibv_wr_abort(qp);
	ibv_wr_start(qp);
	if (!wrong)
		OK(ibv_wr_complete(qp));
	OK(ibv_start_poll(cq, &poll));
	if (!wrong)
		ibv_end_poll(cq);
	OK(ibv_start_poll(cq, &poll));
	if (!wrong)
		ibv_end_poll(cq);
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(e.cq));
}

/* Wrong: a row ends without a beginning, and other calls use the queue within a row. */
static void calls_within_rows(struct end *a, struct end *b)
{
	(void)b;
	struct end e = in_row(a, 0);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e.qp);
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)e.cq;
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_wc wc;
	ibv_wr_start(qp);
	if (wrong)
		post_send(&e, 1, 8, IBV_SEND_SIGNALED);
	ibv_wr_abort(qp);
	if (wrong) {
		ibv_wr_abort(qp);
		ibv_wr_complete(qp);
	}
	OK(ibv_start_poll(cq, &poll));
	if (wrong)
		ibv_poll_cq(e.cq, 1, &wc);
	ibv_end_poll(cq);
	while (ibv_poll_cq(e.cq, 1, &wc) == 1)
		;
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(e.cq));
}

/* Wrong: a field that the program did not ask for, and one where there is no completion any more. */
static void fields_without_completion(struct end *a, struct end *b)
{
	(void)b;
	struct end e = in_row(a, wrong ? 0 : IBV_WC_EX_WITH_QP_NUM);
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)e.cq;
	struct ibv_poll_cq_attr poll = { 0 };
	OK(ibv_start_poll(cq, &poll));
	EQ(ibv_wc_read_qp_num(cq), e.qp->qp_num);
	OK(ibv_next_poll(cq));
	ibv_wc_read_vendor_err(cq);
	EQ(ibv_next_poll(cq), ENOENT);
	if (wrong)
		ibv_wc_read_vendor_err(cq);
	ibv_end_poll(cq);
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(e.cq));
}
