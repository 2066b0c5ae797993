/* Programs of mistakes.c whose threads use one completion queue. */

static struct ibv_cq_ex *of_one_thread;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t both;

/* Polls an empty queue for a while. */
static void *polled_by_two_threads(void *unused)
{
	pthread_barrier_wait(&both);
	double end = now() + 1;
	do {
		struct ibv_poll_cq_attr attr = { 0 };
		struct ibv_wc wc;
		if (!wrong)
			pthread_mutex_lock(&turn);
		if (extended)
			EQ(ibv_start_poll(of_one_thread, &attr), ENOENT);
		else
			OK(ibv_poll_cq(ibv_cq_ex_to_cq(of_one_thread), 1, &wc));
		if (!wrong)
			pthread_mutex_unlock(&turn);
	} while (now() < end);
	return unused;
}

static void cq_polled_by_two_threads(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq_init_attr_ex attr = { .cqe = 8, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED };
	of_one_thread = ibv_create_cq_ex(a->cq->context, &attr);
	TRUE(of_one_thread != NULL);
	OK(pthread_barrier_init(&both, NULL, 2));
	pthread_t other;
	OK(pthread_create(&other, NULL, polled_by_two_threads, NULL));
	polled_by_two_threads(NULL);
	OK(pthread_join(other, NULL));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(of_one_thread)));
}

/* Calls beside a poll, of a queue that was made for one thread. */
static void *resizes(void *unused)
{
	OK(ibv_resize_cq(ibv_cq_ex_to_cq(of_one_thread), 9));
	return unused;
}

static void *asks_for_an_event(void *unused)
{
	OK(ibv_req_notify_cq(ibv_cq_ex_to_cq(of_one_thread), 0));
	return unused;
}

static void *reads_on(void *unused)
{
	struct ibv_poll_cq_attr attr = { 0 };
	if (wrong) {
		EQ(ibv_next_poll(of_one_thread), EINVAL); /* this device refuses it */
	} else {
		OK(ibv_start_poll(of_one_thread, &attr));
		EQ(ibv_next_poll(of_one_thread), ENOENT);
		ibv_end_poll(of_one_thread);
	}
	return unused;
}

/* A thread polls, and another one makes the call before it is done. Right: after it is done. */
static void two_threads(struct end *a, struct end *b, void *(*call)(void *))
{
	(void)b;
	struct ibv_comp_channel *channel = ibv_create_comp_channel(a->cq->context);
	struct ibv_cq_init_attr_ex attr = { .cqe = 8, .channel = channel, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED };
	of_one_thread = ibv_create_cq_ex(a->cq->context, &attr);
	TRUE(of_one_thread != NULL);
	struct end e = *a;
	e.qp = make_qp(a->mr->pd, ibv_cq_ex_to_cq(of_one_thread), IBV_QPT_RC, NULL, 0);
	to_init(e.qp);
	OK(post_recv(&e, 1, 8) || post_recv(&e, 2, 8));
	to_err(e.qp);
	struct ibv_poll_cq_attr poll = { 0 };
	OK(ibv_start_poll(of_one_thread, &poll));
	pthread_t other;
	if (!wrong)
		ibv_end_poll(of_one_thread);
	OK(pthread_create(&other, NULL, call, NULL));
	OK(pthread_join(other, NULL));
	if (wrong)
		ibv_end_poll(of_one_thread);
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(of_one_thread)));
	OK(ibv_destroy_comp_channel(channel));
}

static void resized_by_two_threads(struct end *a, struct end *b)
{
	two_threads(a, b, resizes);
}

static void notified_by_two_threads(struct end *a, struct end *b)
{
	two_threads(a, b, asks_for_an_event);
}

static void read_on_by_two_threads(struct end *a, struct end *b)
{
	two_threads(a, b, reads_on);
}
