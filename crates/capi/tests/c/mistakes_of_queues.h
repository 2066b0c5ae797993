/* Programs of mistakes.c about what a queue has and has not completed. */

/* Wrong: the region ends while its SEND may be on the way. Right: a bind behind it is complete, and frees a full queue. */
static void sends_before_a_bind(struct end *a, struct end *b)
{
	struct ibv_pd *pd = a->mr->pd;
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mr *bound = ibv_reg_mr(pd, a->buf, BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	char *own = calloc(1, 64);
	struct ibv_mr *mr = ibv_reg_mr(pd, own, 64, 0);
	TRUE(mw && bound && mr);
	/* Without a receive the SEND waits. */
	for (int n = 0; n < 8 && !wrong; n++)
		OK(post_recv(b, n, 64));
	struct ibv_sge sge = { .addr = (uintptr_t)own, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	OK(ibv_post_send(a->qp, &wr, &bad));
	struct ibv_mw_bind bind = { .wr_id = 7, .send_flags = IBV_SEND_SIGNALED,
		.bind_info = { .mr = bound, .addr = (uintptr_t)a->buf, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_READ } };
	OK(ibv_bind_mw(a->qp, mw, &bind));
	if (wrong) {
		OK(ibv_dereg_mr(mr));
		to_err(a->qp), to_err(b->qp);
		OK(ibv_dealloc_mw(mw));
		OK(ibv_dereg_mr(bound));
		return;
	}
	EQ(poll_one(a->cq).wr_id, 7);
	poll_one(b->cq);
	OK(post_recv(b, 8, 64));
	usleep(100000); /* the completion of a SEND is believed then */
	memset(own, 9, 64);
	OK(ibv_dereg_mr(mr));
	OK(ibv_bind_mw(a->qp, mw, &bind));
	int n = 0;
	while (post_send(a, 3, 8, 0) == 0)
		n++;
	EQ(n, 7);
	EQ(poll_one(a->cq).wr_id, 7);
	OK(post_send(a, 4, 8, IBV_SEND_SIGNALED));
	EQ(poll_one(a->cq).wr_id, 4);
	OK(ibv_dealloc_mw(mw));
	OK(ibv_dereg_mr(bound));
	free(own);
}

/* Wrong: a list fills the queue, and none of it is signaled. Right: a batch that does not fit leaves room. */
static void more_than_fits(struct end *a, struct end *b)
{
	for (int n = 0; n < 8; n++)
		OK(post_recv(b, n, 64));
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr list[20], *bad = NULL;
	for (int n = 0; n < 20; n++)
		list[n] = (struct ibv_send_wr){ .wr_id = n, .next = n < 19 ? &list[n + 1] : NULL, .sg_list = &sge,
			.num_sge = 1, .opcode = IBV_WR_SEND };
	if (wrong) {
		EQ(ibv_post_send(a->qp, list, &bad), ENOMEM);
		EQ(bad->wr_id, 8);
		return;
	}
	OK(ibv_destroy_qp(a->qp));
	struct ibv_qp_init_attr_ex init = { .send_cq = a->cq, .recv_cq = a->cq, .qp_type = IBV_QPT_RC, .pd = a->mr->pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	a->qp = ibv_create_qp_ex(a->cq->context, &init);
	TRUE(a->qp);
	struct end c = make_end(a->mr->pd, IBV_QPT_RC);
	connect_ends(a, &c);
	OK(post_recv(&c, 1, 64) || post_recv(&c, 2, 64));
	OK(post_send(a, 1, 8, 0));
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	for (int count = 8; count > 0; count -= 7) {
		ibv_wr_start(qp);
		for (int n = 1; n <= count; n++) {
			qp->wr_id = n, qp->wr_flags = n == count ? IBV_SEND_SIGNALED : 0;
			ibv_wr_send(qp);
			ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)a->buf, 8);
		}
		EQ(ibv_wr_complete(qp), count == 8 ? ENOMEM : 0);
	}
	OK(poll_one(a->cq).status);
	free_end(&c);
}

__attribute__((noinline)) static void one_sided(struct end *a, struct end *b, enum ibv_wr_opcode opcode, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .wr.rdma = { (uintptr_t)b->buf, rkey } }, *bad;
	wr.send_flags = opcode == IBV_WR_RDMA_READ ? IBV_SEND_SIGNALED : 0;
	OK(ibv_post_send(a->qp, &wr, &bad));
}

/* Requests of one number. Wrong: the region of the second one does not grant it. */
static void requests_of_one_number(struct end *a, struct end *b)
{
	struct ibv_mr *weak = ibv_reg_mr(b->mr->pd, b->buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	one_sided(a, b, IBV_WR_RDMA_WRITE, b->mr->rkey);
	one_sided(a, b, IBV_WR_RDMA_READ, wrong ? weak->rkey : b->mr->rkey);
	EQ(poll_one(a->cq).status, wrong ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(weak));
}

/* Two queue pairs share an SRQ. Wrong: the region of a receive ends. Right: the receive is complete, and its completion went with its
 * queue pair. */
static void receives_of_two(struct end *a, struct end *b)
{
	struct ibv_context *ctx = a->cq->context;
	struct ibv_pd *pd = a->mr->pd;
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	TRUE(srq);
	struct end c = make_end(pd, IBV_QPT_RC), d = make_end(pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(b->qp) || ibv_destroy_qp(d.qp));
	b->qp = make_qp(pd, b->cq, IBV_QPT_RC, srq, 0);
	d.qp = make_qp(pd, d.cq, IBV_QPT_RC, srq, 0);
	OK(ibv_destroy_qp(a->qp));
	a->qp = make_qp(pd, a->cq, IBV_QPT_RC, NULL, 0);
	connect_ends(a, b), connect_ends(&c, &d);
	char *own = calloc(1, 64);
	struct ibv_mr *mr = ibv_reg_mr(pd, own, 64, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { .addr = (uintptr_t)own, .length = 64, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
	if (wrong)
		OK(ibv_dereg_mr(mr));
	else {
		OK(post_send(a, 1, 8, IBV_SEND_SIGNALED));
		OK(poll_one(a->cq).status);
		usleep(100000); /* the completion is believed then */
	}
	to_err(b->qp);
	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	ibv_ack_async_event(&event);
	OK(ibv_destroy_qp(b->qp));
	if (!wrong)
		OK(ibv_dereg_mr(mr));
	b->qp = make_qp(pd, b->cq, IBV_QPT_RC, NULL, 0);
	free_end(&c), free_end(&d);
	OK(ibv_destroy_srq(srq));
	free(own);
}

/* A queue of one completion may lose the oldest. Wrong: the region of a receive that is not complete ends. */
static void completions_that_are_lost(struct end *a, struct end *b)
{
	struct ibv_pd *pd = a->mr->pd;
	struct ibv_cq_init_attr_ex lossy = { .cqe = 1, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN };
	struct ibv_cq *cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(pd->context, &lossy));
	OK(ibv_destroy_qp(a->qp) || ibv_destroy_qp(b->qp));
	a->qp = make_qp(pd, a->cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = b->cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2 } };
	b->qp = ibv_create_qp(pd, &init);
	connect_ends(a, b);
	char *own = calloc(1, 64);
	struct ibv_mr *mr = ibv_reg_mr(pd, own, 64, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { .addr = (uintptr_t)own, .length = 64, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_recv(b->qp, &wr, &bad) || post_recv(b, 2, 64));
	for (int n = 0; n < (wrong ? 0 : 2); n++) {
		OK(post_send(a, n, 8, IBV_SEND_SIGNALED));
		OK(poll_one(a->cq).status);
	}
	if (!wrong)
		EQ(poll_one(cq).wr_id, 2);
	usleep(100000); /* a completion is believed then */
	OK(ibv_dereg_mr(mr));
	OK(ibv_destroy_qp(b->qp));
	OK(ibv_destroy_cq(cq));
	b->qp = make_qp(pd, b->cq, IBV_QPT_RC, NULL, 0);
	free(own);
}
