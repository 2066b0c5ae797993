/* Programs that do one thing wrong, and what their users see. The first argument says what, the second is "one" or "two"
 * hosts, or "link" for two with link-local addresses. With "swapped" as the third the failing end is the second process, on the
 * other host. Lines of the log of the other process begin with "peer: ". EXPLAIN_LINES tells how many lines the log of the failing end
 * has, and that of the other one. */
#include "hosts.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>

static const char *mistake;

static bool is(const char *name)
{
	return !strcmp(mistake, name);
}

/* The requests have no answer. */
static bool is_silent(void)
{
	return is("no-route") || is("no-arp") || is("peer-ended") || is("no-qp") || is("not-ready") || is("in-error") || is("psn") ||
	       is("gid") || is("qpn") || is("partition");
}

static void rts(struct ibv_qp *qp, uint32_t psn)
{
	/* Where no answer is expected it is awaited for a quarter of a second, elsewhere for two: a busy machine may be late. A host says
	 * of a few packets that nobody holds the port. With the longer timeout there are more repeats. */
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = is("nobody-on-port") ? 15 : is_silent() ? 14 : 17, .retry_cnt = 3,
		.rnr_retry = 3, .max_rd_atomic = 1, .sq_psn = psn };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					 IBV_QP_MAX_QP_RD_ATOMIC));
}

static void show(struct ibv_wc wc)
{
	printf("wr_id %ld: status %d (%s), vendor_err %u\n", (long)wc.wr_id, wc.status, ibv_wc_status_str(wc.status),
	       wc.vendor_err);
}

static int rights(void)
{
	return is("no-right") ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ :
				IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
}

/* Nobody listens on the port. */
static void connect_to(const struct address *peer)
{
	/* A synchronous id. */
	struct rdma_cm_id *id;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7471) };
	memcpy(&to.sin_addr, peer->gid.raw + 12, 4);
	OK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	OK(rdma_resolve_route(id, 2000));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	OK(rdma_create_qp(id, NULL, &init));
	int ret = rdma_connect(id, NULL);
	printf("rdma_connect: %s\n", ret ? strerror(errno) : "connected");
	rdma_destroy_qp(id);
	OK(rdma_destroy_id(id));
}

/* Waits until all threads of the other process are in this state, a letter of proc_pid_stat(5). A process that has ended is a zombie, and its
 * descriptors are closed. */
static void await_state(char wanted)
{
	pid_t pid;
	TRUE(hear(&pid, sizeof pid));
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/task", pid);
	for (bool are_all = false; !are_all; usleep(1000)) {
		DIR *tasks = opendir(path);
		TRUE(tasks != NULL);
		are_all = true;
		for (struct dirent *task; (task = readdir(tasks));) {
			if (task->d_name[0] == '.')
				continue;
			char name[400], state = 0;
			snprintf(name, sizeof name, "%s/%s/stat", path, task->d_name);
			FILE *file = fopen(name, "r");
			are_all &= file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == wanted;
			if (file)
				fclose(file);
		}
		closedir(tasks);
	}
}

/* The process whose requests fail. */
static void client(struct ibv_context *ctx, struct end *e, struct address *peer, int index)
{
	if (is("no-listener"))
		return connect_to(peer);
	if (is("nobody-on-port") || is("no-route") || is("no-arp"))
		inet_pton(AF_INET, is("no-route") ? "10.99.0.1" : is("no-arp") ? "10.77.0.3" : is_second ? "10.77.0.1" : "10.77.0.2", peer->gid.raw + 12);
	int ret = rtr(e->qp, index, peer, IBV_MTU_1024, 1);
	if (ret) {
		printf("ibv_modify_qp to RTR: %s\n", strerror(ret));
		return;
	}
	rts(e->qp, is("psn") ? 0x1234 : 1);
	meet();
	struct ibv_sge sges[2], sge = { .addr = (uintptr_t)e->buf, .length = 64, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { .remote_addr = peer->va, .rkey = peer->rkey } }, *bad;
	if (is("no-receive") || is("mtu") || is("receive-too-short") || is("receive-of-other-pd"))
		wr.opcode = IBV_WR_SEND, sge.length = is("no-receive") || is("receive-of-other-pd") ? 64 : 8192;
	/* A WRITE within a host needs nothing of the other process, and compares no PSNs. */
	if ((is("silent-now") && !two) || is("psn"))
		wr.opcode = IBV_WR_SEND;
	if (is("rkey-unknown"))
		wr.wr.rdma.rkey ^= 0x1555;
	if (is("lkey-as-rkey"))
		wr.wr.rdma.rkey = peer->lkey;
	if (is("behind-region"))
		wr.wr.rdma.remote_addr += BUF, wr.wr.rdma.remote_addr -= 32;
	if (is("rkey-as-lkey"))
		sge.lkey = e->mr->rkey;
	if (is("second-element")) {
		sges[0] = sges[1] = sge, sges[1].addr += BUF;
		wr.sg_list = sges, wr.num_sge = 2;
	}
	if (is("local-range"))
		sge.length = BUF + 100;
	if (is("local-unmapped"))
		munmap(e->buf, BUF);
	if (is("local-dereg")) {
		OK(ibv_dereg_mr(e->mr));
		e->mr = NULL;
	}
	if (is("silent-now")) {
		OK(ibv_post_send(e->qp, &wr, &bad));
		show(poll_one(e->cq));
		wr.wr_id = 2;
	}
	meet();
	if (is("peer-ended") || is("silent-now"))
		await_state(is("peer-ended") ? 'Z' : 'T');
	OK(ibv_post_send(e->qp, &wr, &bad));
	if (is("flush"))
		to_err(e->qp);
	wr.wr_id = 2 + is("silent-now");
	ret = ibv_post_send(e->qp, &wr, &bad);
	struct ibv_wc wc = poll_one(e->cq);
	show(wc);
	if (ret == 0 && wc.status)
		show(poll_one(e->cq));
	(void)ctx;
}

/* The process that they reach, or do not. */
static void server(struct ibv_context *ctx, struct end *e, struct address *peer, int index)
{
	struct address to = *peer;
	if (is("no-listener"))
		pause();
	if (is("gid"))
		inet_pton(AF_INET, two ? "10.77.0.9" : "127.0.0.9", to.gid.raw + 12);
	if (is("qpn"))
		to.qpn ^= 1;
	if (is("receive-too-short") || is("mtu"))
		OK(post_recv(e, 7, is("mtu") ? 16384 : 1024));
	if (is("silent-now"))
		OK(post_recv(e, 7, 64));
	if (is("receive-of-other-pd")) {
		struct ibv_mr *mr = ibv_reg_mr(ibv_alloc_pd(ctx), e->buf, BUF, IBV_ACCESS_LOCAL_WRITE);
		e->mr = mr;
		OK(post_recv(e, 7, 1024));
	}
	if (!is("not-ready") && !is("flush")) {
		OK(rtr(e->qp, index, &to, is("mtu") ? IBV_MTU_512 : IBV_MTU_1024, 1));
		rts(e->qp, 1);
	}
	meet();
	if (is("rkey-dereg"))
		OK(ibv_dereg_mr(e->mr));
	if (is("in-error"))
		to_err(e->qp);
	if (is("no-qp"))
		OK(ibv_destroy_qp(e->qp));
	meet();
	pid_t pid = getpid();
	if (is("peer-ended") || is("silent-now"))
		tell(&pid, sizeof pid);
	if (is("peer-ended"))
		_exit(0);
	if (is("silent-now"))
		kill(getpid(), SIGSTOP);
	if (is("receive-too-short") || is("receive-of-other-pd"))
		show(poll_one(e->cq));
	char c;
	while (read(other, &c, 1) > 0)
		;
}

static void *destroy(void *qp)
{
	printf("ibv_destroy_qp: %s\n", strerror(ibv_destroy_qp(qp)));
	return NULL;
}

/* One process, without a peer. */
static void alone(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	if (is("call-modify")) {
		printf("without IBV_QP_PORT: %s\n",
		       strerror(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS)));
		attr.qp_state = IBV_QPS_RTS;
		printf("to RTS: %s\n", strerror(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)));
		to_init(a.qp);
		to_rtr(a.qp, b.qp->qp_num);
		attr.timeout = 40;
		int mask = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			   IBV_QP_MAX_QP_RD_ATOMIC;
		printf("timeout 40: %s\n", strerror(ibv_modify_qp(a.qp, &attr, mask)));
		attr.timeout = 14, attr.path_mtu = IBV_MTU_1024;
		printf("with IBV_QP_PATH_MTU: %s\n", strerror(ibv_modify_qp(a.qp, &attr, mask | IBV_QP_PATH_MTU)));
	} else if (is("call-gid")) {
		struct address to = { .qpn = 0x20001 };
		inet_pton(AF_INET, "10.99.0.1", to.gid.raw + 12);
		to.gid.raw[10] = to.gid.raw[11] = 0xff;
		to_init(a.qp);
		printf("ibv_modify_qp to RTR: %s\n", strerror(rtr(a.qp, gid_index(ctx), &to, IBV_MTU_1024, 1)));
	} else if (is("call-limit")) {
		struct ibv_qp_init_attr init = { .send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 100000, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
		printf("ibv_create_qp: %s\n", ibv_create_qp(pd, &init) ? "made" : strerror(errno));
		printf("ibv_create_cq: %s\n", ibv_create_cq(ctx, 10000000, NULL, NULL, 0) ? "made" : strerror(errno));
	} else if (is("call-reg-mr")) {
		char *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		munmap(memory + 4096, 4096);
		printf("ibv_reg_mr: %s\n", ibv_reg_mr(pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE) ? "made" : strerror(errno));
	} else if (is("call-send-queue-full")) {
		connect_ends(&a, &b);
		int ret = 0, n;
		for (n = 0; n < 8; n++)
			OK(post_recv(&b, n, 64));
		for (n = 0; !ret; n++)
			ret = post_send(&a, n, 8, 0);
		printf("ibv_post_send of wr_id %d: %s\n", n - 1, strerror(ret));
	} else if (is("call-cq-overrun")) {
		struct ibv_cq *small = ibv_create_cq(ctx, 1, NULL, NULL, 0);
		struct end c = a;
		c.qp = make_qp(pd, small, IBV_QPT_RC, NULL, 1);
		connect_ends(&c, &b);
		for (int n = 0; n < 8; n++)
			EQ(post_recv(&b, n, 64) | post_send(&c, n, 8, 0), 0);
		struct ibv_async_event event;
		OK(ibv_get_async_event(ctx, &event));
		/* The log says why before the queue pair fails. */
		struct ibv_qp_init_attr init;
		do
			OK(ibv_query_qp(c.qp, &attr, IBV_QP_STATE, &init));
		while (attr.qp_state != IBV_QPS_ERR);
		printf("event: %s\n", ibv_event_type_str(event.event_type));
	} else if (is("call-destroy")) {
		printf("ibv_destroy_cq: %s\n", strerror(ibv_destroy_cq(a.cq)));
		printf("ibv_dealloc_pd: %s\n", strerror(ibv_dealloc_pd(pd)));
		/* The first message before RTS raises an event, which is read and not acknowledged. */
		to_init(a.qp), to_init(b.qp);
		to_rtr(a.qp, b.qp->qp_num), to_rtr(b.qp, a.qp->qp_num);
		to_rts(a.qp);
		EQ(post_recv(&b, 1, 64) | post_send(&a, 1, 8, IBV_SEND_SIGNALED), 0);
		show(poll_one(a.cq));
		struct ibv_async_event event;
		OK(ibv_get_async_event(ctx, &event));
		pthread_t thread;
		OK(pthread_create(&thread, NULL, destroy, b.qp));
		usleep(1500000);
		ibv_ack_async_event(&event);
		pthread_join(thread, NULL);
	}
}

static struct ibv_context *ctx;
static struct end e;
static int sgid_index;

static void make(struct address *own)
{
	if (is("nobody-on-port") && is_server) {
		*own = (struct address){ .gid.raw = { [10] = 0xff, [11] = 0xff }, .qpn = 0x20001, .psn = 1 };
		return;
	}
	ctx = open_device();
	sgid_index = gid_index(ctx);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	e.cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	e.buf = mmap(NULL, 2 * BUF, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	e.mr = ibv_reg_mr(is("rkey-of-other-pd") && is_server ? ibv_alloc_pd(ctx) : pd, e.buf, BUF, rights());
	TRUE(e.cq && e.mr);
	e.qp = make_qp(pd, e.cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = is("partition") && is_server,
		.qp_access_flags = is("qp-right") ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };
	OK(ibv_modify_qp(e.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	*own = (struct address){ .qpn = e.qp->qp_num, .psn = 1, .va = (uintptr_t)e.buf, .lkey = e.mr->lkey, .rkey = e.mr->rkey };
	OK(ibv_query_gid(ctx, 1, sgid_index, &own->gid));
}

/* How many lines the logs will have: that of the failing end, and that of the other one. */
static int lines[2];

/* Waits until a file has so many lines, or does not get them. */
static void await_lines(int file, int wanted)
{
	for (double until = now() + 20; now() < until; usleep(1000)) {
		static char text[65536];
		ssize_t len = pread(file, text, sizeof text, 0);
		TRUE(len >= 0);
		int found = 0;
		for (ssize_t n = 0; n < len; n++)
			found += text[n] == '\n';
		if (found >= wanted)
			return;
	}
}

static void run_end(void)
{
	struct address peer;
	exchange(&peer, make);
	if (is_server && is("nobody-on-port")) {
		meet(), meet();
		pause();
	}
	(is_server ? server : client)(ctx, &e, &peer, sgid_index);
	/* A line of the log may come a little after its completion. */
	await_lines(2, lines[0]);
	/* For those that nobody expects. */
	usleep(100000);
	_exit(0);
}

int main(int argc, char **argv)
{
	TRUE(argc == 3 || (argc == 4 && !strcmp(argv[3], "swapped")));
	mistake = argv[1], by_link = !strcmp(argv[2], "link"), two = by_link || !strcmp(argv[2], "two");
	if (!strncmp(mistake, "call-", 5)) {
		dup2(1, 2);
		setvbuf(stdout, NULL, _IONBF, 0);
		OK(system("ip link set lo up"));
		alone();
		_exit(0);
	}
	const char *told = getenv("EXPLAIN_LINES");
	TRUE(told && sscanf(told, "%d %d", &lines[0], &lines[1]) == 2);
	bool is_swapped = argc == 4;
	pid_t pids[2];
	begin_hosts(pids, is_swapped, run_end);
	/* The one that fails ends. The log is shown first. */
	EQ(waitpid(pids[is_swapped], NULL, 0), pids[is_swapped]);
	await_lines(fileno(logged[!is_swapped]), lines[1]);
	kill(pids[!is_swapped], SIGKILL);
	waitpid(pids[!is_swapped], NULL, 0);
	copy(logged[is_swapped], "");
	copy(said[is_swapped], "");
	copy(logged[!is_swapped], "peer: ");
	copy(said[!is_swapped], "peer: ");
	_exit(0);
}
