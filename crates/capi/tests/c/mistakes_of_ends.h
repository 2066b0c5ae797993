/* Programs of mistakes.c that end or change objects too early, or events too often. */

/* The completion of a send lies in the completion queue when its region and its queue pair end. Wrong: it cannot come yet. */
static void ended_before_a_poll(struct end *a, struct end *b)
{
	struct end other = *a;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(a->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	other.qp = make_qp(a->mr->pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(b->qp, &reset, IBV_QP_STATE));
	connect_ends(&other, b);
	/* 655 ms, the longest: the SEND is not repeated before the ends. */
	struct ibv_qp_attr slow = { .min_rnr_timer = 0 };
	OK(ibv_modify_qp(b->qp, &slow, IBV_QP_MIN_RNR_TIMER));
	if (!wrong)
		OK(post_recv(b, 1, 64));
	OK(post_send(&other, 2, 8, IBV_SEND_SIGNALED));
	if (!wrong)
		OK(status_of_next(b));
	usleep(300000);
	OK(ibv_dereg_mr(other.mr));
	OK(ibv_destroy_qp(other.qp));
	OK(ibv_destroy_cq(cq));
	free(other.buf);
}

/* As above, with the receive of the other side. */
static void received_before_a_poll(struct end *a, struct end *b)
{
	struct end other = *b;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(b->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	OK(post_recv(&other, 1, 64));
	if (wrong)
		OK(post_recv(&other, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
	usleep(300000);
	OK(ibv_dereg_mr(other.mr));
	free(other.buf);
}

static void changed_with_work(struct end *a, struct end *b)
{
	(void)a;
	OK(post_recv(b, 1, 64));
	if (!wrong)
		to_err(b->qp);
	static char other[64];
	OK(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, sizeof other, 0));
}

/* A context, and a protection domain of it. */
static void context_closed_in_use(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_context *ctx = ibv_open_device(a->cq->context->device);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	if (wrong)
		OK(ibv_close_device(ctx));
	OK(ibv_dealloc_pd(pd));
	if (!wrong)
		OK(ibv_close_device(ctx));
}

static void domains_ended_in_use(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_context *ctx = a->cq->context;
	struct ibv_td *td = ibv_alloc_td(ctx, &(struct ibv_td_init_attr){ 0 });
	struct ibv_parent_domain_init_attr init = { .pd = a->mr->pd, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(ctx, &init);
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
		.oflags = O_CREAT };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(ctx, &attr);
	struct ibv_qp_init_attr_ex target = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &target);
	TRUE(td && parent && xrcd && qp);
	if (wrong) {
		EQ(ibv_dealloc_td(td), EBUSY);
		EQ(ibv_close_xrcd(xrcd), EBUSY);
	}
	OK(ibv_dealloc_pd(parent));
	OK(ibv_dealloc_td(td));
	OK(ibv_destroy_qp(qp));
	OK(ibv_close_xrcd(xrcd));
}

static void parts_ended_in_use(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_context *ctx = a->cq->context;
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &(struct ibv_alloc_dm_attr){ .length = 4096 });
	struct ibv_mr *mr = ibv_reg_dm_mr(a->mr->pd, dm, 0, 4096, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE);
	TRUE(pd && mw && dm && mr);
	if (wrong) {
		EQ(ibv_dealloc_pd(pd), EBUSY);
		EQ(ibv_free_dm(dm), EBUSY);
	}
	OK(ibv_dealloc_mw(mw));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_dereg_mr(mr));
	OK(ibv_free_dm(dm));
}

/* Domains and device memory. */
static void domains_left(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_context *ctx = a->cq->context;
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_td *td = ibv_alloc_td(ctx, &(struct ibv_td_init_attr){ 0 });
	struct ibv_parent_domain_init_attr init = { .pd = pd, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(ctx, &init);
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
		.oflags = O_CREAT };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(ctx, &attr);
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &(struct ibv_alloc_dm_attr){ .length = 4096 });
	TRUE(pd && td && parent && xrcd && dm);
	if (wrong)
		return;
	OK(ibv_free_dm(dm));
	OK(ibv_close_xrcd(xrcd));
	OK(ibv_dealloc_pd(parent));
	OK(ibv_dealloc_td(td));
	OK(ibv_dealloc_pd(pd));
}

/* An identifier and its queue pair. The completion queues are the library's. */
static void identifier_left(struct end *a, struct end *b)
{
	(void)a, (void)b;
	struct rdma_cm_id *id;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(7471) };
	OK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	OK(rdma_create_qp(id, NULL, &init));
	if (wrong)
		return;
	rdma_destroy_qp(id);
	OK(rdma_destroy_id(id));
}

static void channel_destroyed_in_use(struct end *a, struct end *b)
{
	(void)a, (void)b;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	if (wrong)
		rdma_destroy_event_channel(channel);
	OK(rdma_destroy_id(id));
	if (!wrong)
		rdma_destroy_event_channel(channel);
}

static void *acknowledge_late(void *event)
{
	let_wait();
	OK(rdma_ack_cm_event(event));
	return NULL;
}

/* Waits for an event of the identifier. */
static void unacknowledged_event_of_an_identifier(struct end *a, struct end *b)
{
	(void)a, (void)b;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	OK(rdma_get_cm_event(channel, &event));
	pthread_t thread;
	OK(pthread_create(&thread, NULL, acknowledge_late, event));
	OK(rdma_destroy_id(id));
	OK(pthread_join(thread, NULL));
	rdma_destroy_event_channel(channel);
}

static void *acknowledge_async(void *event)
{
	usleep(2000000);
	ibv_ack_async_event(event);
	return NULL;
}

/* An SRQ whose end is refused, and waits the next time. Right: it is ended once, and the event was acknowledged. */
static void refused_and_then_waits(struct end *a, struct end *b)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(a->mr->pd, &init);
	struct end small = with_small_cq(b, a, srq);
	post_to_srq(srq, b);
	struct ibv_srq_attr limit = { .srq_limit = 1 };
	OK(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a) || poll_one(small.cq).status);
	struct ibv_async_event event;
	OK(ibv_get_async_event(a->cq->context, &event));
	EQ(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	if (wrong)
		EQ(ibv_destroy_srq(srq), EBUSY);
	to_err(small.qp);
	OK(ibv_destroy_qp(small.qp));
	pthread_t thread;
	if (wrong)
		OK(pthread_create(&thread, NULL, acknowledge_async, &event));
	else
		ibv_ack_async_event(&event);
	OK(ibv_destroy_srq(srq));
	if (wrong)
		OK(pthread_join(thread, NULL));
	OK(ibv_destroy_cq(small.cq));
}

/* Wrong: the event of one queue is acknowledged for another. */
static void acknowledged_too_often(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_comp_channel *channel = ibv_create_comp_channel(a->cq->context);
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, channel, 0);
	struct end e = *a;
	e.qp = make_qp(a->mr->pd, cq, IBV_QPT_RC, NULL, 0);
	to_init(e.qp);
	OK(post_recv(&e, 1, 8));
	OK(ibv_req_notify_cq(cq, 0));
	to_err(e.qp);
	struct ibv_cq *found;
	void *context;
	OK(ibv_get_cq_event(channel, &found, &context));
	ibv_ack_cq_events(cq, 1 + wrong);
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_comp_channel(channel));
}

/* A SEND fails. Wrong: the program ends at once, and leaves all that it has made. */
static void ends_at_its_first_error(struct end *a, struct end *b)
{
	bool leaves = wrong;
	wrong = true;
	rights_too_weak(a, b);
	if (leaves)
		exit(3);
}
