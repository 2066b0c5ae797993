/* Programs of mistakes.c that fork. */
static void posted_from_forked_child(struct end *a, struct end *b)
{
	int status;
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		if (wrong) {
			TRUE(send_some(a, 1, 8, IBV_SEND_SIGNALED) != 0);
			exit(0);
		}
		struct ibv_pd *pd = ibv_alloc_pd(open_device());
		struct end c = make(pd, IBV_QPT_RC), d = make(pd, IBV_QPT_RC);
		connect_ends(&c, &d);
		OK(post_recv(&d, 1, 64));
		OK(send_some(&c, 1, 8, IBV_SEND_SIGNALED));
		OK(status_of_next(&c));
		exit(0);
	}
	EQ(waitpid(child, &status, 0), child);
	TRUE(WIFEXITED(status));
	OK(post_recv(b, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
	result = WEXITSTATUS(status);
}

/* Right: the child closes its copies of descriptors, and ends what it made itself. */
static void ended_by_a_forked_child(struct end *a, struct end *b)
{
	int status;
	struct ibv_context *ctx = a->qp->context;
	struct ibv_comp_channel *events = ibv_create_comp_channel(ctx);
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		struct ibv_pd *pd = ibv_alloc_pd(ctx);
		struct end c = make(pd, IBV_QPT_RC), d = make(pd, IBV_QPT_RC);
		connect_ends(&c, &d);
		OK(post_recv(&d, 1, 64));
		OK(send_some(&c, 1, 8, IBV_SEND_SIGNALED));
		OK(status_of_next(&c));
		free_end(&c), free_end(&d);
		OK(ibv_dealloc_pd(pd));
		if (wrong)
			OK(ibv_destroy_qp(a->qp) || ibv_destroy_qp(b->qp));
		OK(ibv_destroy_comp_channel(events));
		exit(0);
	}
	EQ(waitpid(child, &status, 0), child);
	TRUE(WIFEXITED(status));
	OK(post_recv(b, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
	OK(ibv_destroy_comp_channel(events));
	result = WEXITSTATUS(status);
}

/* Forks before the device is opened, as servers do. The child works with it, and the parent does not. */
static int forks_first(void)
{
	int status, n;
	ibv_free_device_list(ibv_get_device_list(&n));
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		struct ibv_context *ctx = open_device();
		struct ibv_pd *pd = ibv_alloc_pd(ctx);
		static char memory[64];
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, 0);
		OK(ibv_dereg_mr(mr));
		if (wrong)
			EQ(ibv_dereg_mr(mr), EINVAL);
		OK(ibv_dealloc_pd(pd) || ibv_close_device(ctx));
		exit(extended ? 3 : 0);
	}
	EQ(waitpid(child, &status, 0), child);
	TRUE(WIFEXITED(status));
	return WEXITSTATUS(status);
}
