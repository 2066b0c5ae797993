/*
 * Load: as many objects, processes and threads as somebody may come with.
 *
 * load objects QPS MRS          so many connected queue pairs and regions in one process; prints what they cost
 * load processes N MESSAGES     so many processes, each with a connection to each other one, all sending at once
 * load threads N OPERATIONS     so many threads on one queue pair, one completion queue, one SRQ
 * load limits                   a queue that is full, one that is empty, no keys left
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check_line.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	CHECK(ibv_query_gid(context, 1, 0, &gid) == 0);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Resident memory of this process that is not of a file, in KiB. */
static long resident(void)
{
	char line[256];
	long kib = -1;
	FILE *file = fopen("/proc/self/status", "r");
	CHECK(file);
	while (fgets(line, sizeof line, file))
		if (sscanf(line, "RssAnon: %ld", &kib) == 1)
			break;
	fclose(file);
	CHECK(kib >= 0);
	return kib;
}

static struct ibv_qp *make_qp(struct ibv_cq *cq, struct ibv_srq *srq, uint32_t depth)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = depth, .max_recv_wr = srq ? 0 : depth,
						  .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	return qp;
}

static void connect_qp(struct ibv_qp *qp, union ibv_gid to, uint32_t peer, uint8_t rnr_retry)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				    .max_dest_rd_atomic = 4, .min_rnr_timer = 5, .timeout = 18, .retry_cnt = 7,
				    .rnr_retry = rnr_retry, .max_rd_atomic = 4,
				    .ah_attr = { .is_global = 1, .port_num = 1,
						 .grh = { .dgid = to, .hop_limit = 64 } } };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void *memory(size_t length)
{
	void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

static struct ibv_mr *region(void *at, size_t length)
{
	return ibv_reg_mr(pd, at, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
}

static int post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_mr *from, struct ibv_mr *to, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)from->addr, 8, from->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (to)
		wr.wr.rdma.remote_addr = (uintptr_t)to->addr, wr.wr.rdma.rkey = to->rkey;
	return ibv_post_send(qp, &wr, &bad);
}

/* Polls until a completion is there. */
static struct ibv_wc one(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	double begin = seconds();
	int got;
	while ((got = ibv_poll_cq(cq, 1, &wc)) == 0)
		CHECK(seconds() - begin < 60);
	CHECK(got == 1);
	return wc;
}

static void objects(int qps, int mrs)
{
	struct ibv_cq *cq = ibv_create_cq(context, 1024, NULL, NULL, 0);
	struct ibv_qp **qp = calloc((size_t)qps, sizeof *qp);
	struct ibv_mr **mr = calloc((size_t)mrs, sizeof *mr);
	uint64_t *words = memory((size_t)mrs * 8);
	uint64_t word = 42;
	struct ibv_mr *own = region(&word, sizeof word);
	CHECK(cq && qp && mr && own && qps % 2 == 0);
	memset(words, 0, (size_t)mrs * 8);

	long before = resident();
	double begin = seconds();
	for (int i = 0; i < qps; i++)
		qp[i] = make_qp(cq, NULL, 16);
	for (int i = 0; i < qps; i++)
		connect_qp(qp[i], gid, qp[i ^ 1]->qp_num, 7);
	double made = seconds() - begin;
	printf("%d QPs: %.1f us each to make and connect, %.1f KiB each\n", qps, made / qps * 1e6,
	       (double)(resident() - before) / qps);
	CHECK(made / qps < 0.002);

	before = resident();
	begin = seconds();
	for (int i = 0; i < mrs; i++) {
		mr[i] = region(&words[i], 8);
		CHECK(mr[i]);
	}
	made = seconds() - begin;
	printf("%d MRs: %.2f us each to register, %.0f bytes each\n", mrs, made / mrs * 1e6,
	       (double)(resident() - before) * 1024 / mrs);
	CHECK(made / mrs < 0.001);

	/* Each queue pair works, and each region is found. */
	begin = seconds();
	int writes = qps > mrs ? qps : mrs;
	for (int i = 0; i < writes; i++) {
		word = (uint64_t)i + 1;
		CHECK(!post(qp[i % qps], IBV_WR_RDMA_WRITE, own, mr[i % mrs], (uint64_t)i));
		struct ibv_wc wc = one(cq);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i);
		CHECK(words[i % mrs] == word);
	}
	printf("%d WRITEs, each on another QP to another MR: %.2f us each\n", writes, (seconds() - begin) / writes * 1e6);

	begin = seconds();
	for (int i = 0; i < mrs; i++)
		CHECK(!ibv_dereg_mr(mr[i]));
	printf("deregistered: %.2f us each\n", (seconds() - begin) / mrs * 1e6);
	begin = seconds();
	for (int i = 0; i < qps; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	printf("destroyed: %.2f us each\n", (seconds() - begin) / qps * 1e6);
	CHECK(!ibv_dereg_mr(own) && !ibv_destroy_cq(cq));
}

#define MOST 64

/* What the processes tell each other. */
struct board {
	_Atomic int ready, connected, done;
	uint32_t qpn[MOST][MOST];
};

static void await(_Atomic int *count, int all)
{
	double begin = seconds();
	++*count;
	while (*count < all) {
		CHECK(seconds() - begin < 200);
		usleep(1000);
	}
}

static void process(struct board *board, int me, int all, int messages)
{
	open_device();
	struct ibv_cq *cq = ibv_create_cq(context, 64 * MOST, NULL, NULL, 0);
	uint8_t *buffer = memory(4096);
	struct ibv_mr *mr = region(buffer, 4096);
	struct ibv_qp *qp[MOST] = { 0 };
	CHECK(cq && mr);
	struct ibv_sge sge = { (uintptr_t)buffer + 1024, 64, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
	for (int i = 0; i < all; i++) {
		if (i == me)
			continue;
		qp[i] = make_qp(cq, NULL, 16);
		board->qpn[me][i] = qp[i]->qp_num;
		for (int k = 0; k < 16; k++)
			CHECK(!ibv_post_recv(qp[i], &recv, &bad));
	}
	await(&board->ready, all);
	for (int i = 0; i < all; i++)
		if (qp[i])
			connect_qp(qp[i], gid, board->qpn[i][me], 7);
	await(&board->connected, all);
	int sent[MOST] = { 0 }, outstanding[MOST] = { 0 }, received = 0, completed = 0;
	int total = (all - 1) * messages;
	double begin = seconds();
	while (received < total || completed < total) {
		for (int i = 0; i < all; i++)
			if (qp[i] && sent[i] < messages && outstanding[i] < 4) {
				CHECK(!post(qp[i], IBV_WR_SEND, mr, NULL, (uint64_t)i));
				sent[i]++, outstanding[i]++;
			}
		struct ibv_wc wc[16];
		int got = ibv_poll_cq(cq, 16, wc);
		CHECK(got >= 0);
		for (int k = 0; k < got; k++) {
			CHECK(wc[k].status == IBV_WC_SUCCESS);
			if (wc[k].opcode == IBV_WC_RECV) {
				int from = 0;
				while (from < all && (!qp[from] || qp[from]->qp_num != wc[k].qp_num))
					from++;
				CHECK(from < all && !ibv_post_recv(qp[from], &recv, &bad));
				received++;
			} else {
				outstanding[wc[k].wr_id]--;
				completed++;
			}
		}
		CHECK(seconds() - begin < 200);
	}
	await(&board->done, all);
	_exit(0);
}

static void processes(int all, int messages)
{
	struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(board != MAP_FAILED && all <= MOST);
	double begin = seconds();
	for (int i = 0; i < all; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (!child)
			process(board, i, all, messages);
	}
	int failed = 0, status;
	while (wait(&status) > 0)
		failed += status != 0;
	CHECK(failed == 0);
	printf("%d processes, %d connections, %d messages: %.2f s\n", all, all * (all - 1),
	       all * (all - 1) * messages, seconds() - begin);
}

static struct ibv_cq *shared_cq;
static struct ibv_qp *shared_qp;
static struct ibv_srq *shared_srq;
static struct ibv_mr *shared_mr;
static _Atomic uint8_t *seen;
static _Atomic int posted, completed, received, refilled;
static int operations;

/* Posts on the one queue pair, polls the one completion queue and fills the one SRQ. */
static void *hammer(void *unused)
{
	struct ibv_sge sge = { (uintptr_t)shared_mr->addr + 64, 8, shared_mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
	double begin = seconds();
	while (completed < operations || received < operations) {
		int mine = posted;
		if (mine < operations && atomic_compare_exchange_weak(&posted, &mine, mine + 1)) {
			int failed;
			while ((failed = post(shared_qp, IBV_WR_SEND, shared_mr, NULL, (uint64_t)mine)) == ENOMEM) {
				struct ibv_wc wc;
				int got = ibv_poll_cq(shared_cq, 1, &wc);
				CHECK(got >= 0);
				if (got && wc.opcode == IBV_WC_RECV) {
					received++;
				} else if (got) {
					CHECK(wc.status == IBV_WC_SUCCESS && !seen[wc.wr_id]++);
					completed++;
				}
			}
			CHECK(!failed);
		}
		struct ibv_wc wc[4];
		int got = ibv_poll_cq(shared_cq, 4, wc);
		CHECK(got >= 0);
		for (int i = 0; i < got; i++) {
			CHECK(wc[i].status == IBV_WC_SUCCESS);
			if (wc[i].opcode == IBV_WC_RECV) {
				received++;
			} else {
				CHECK(!seen[wc[i].wr_id]++);
				completed++;
			}
		}
		/* One for each that was used, by whoever comes first; an SRQ that runs dry stops nobody for long. */
		int filled = refilled;
		if (filled < received && atomic_compare_exchange_weak(&refilled, &filled, filled + 1))
			CHECK(!ibv_post_srq_recv(shared_srq, &recv, &bad));
		CHECK(seconds() - begin < 100);
	}
	return unused;
}

static void threads(int all, int count)
{
	operations = count;
	seen = calloc((size_t)count, 1);
	shared_mr = region(memory(4096), 4096);
	shared_cq = ibv_create_cq(context, 4096, NULL, NULL, 0);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 256, .max_sge = 1 } };
	shared_srq = ibv_create_srq(pd, &init);
	CHECK(seen && shared_mr && shared_cq && shared_srq);
	shared_qp = make_qp(shared_cq, NULL, 64);
	struct ibv_qp *peer = make_qp(shared_cq, shared_srq, 64);
	connect_qp(shared_qp, gid, peer->qp_num, 7);
	connect_qp(peer, gid, shared_qp->qp_num, 7);
	struct ibv_sge sge = { (uintptr_t)shared_mr->addr + 64, 8, shared_mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
	for (int i = 0; i < 64; i++)
		CHECK(!ibv_post_srq_recv(shared_srq, &recv, &bad));
	pthread_t thread[64];
	CHECK(all <= 64);
	double begin = seconds();
	for (int i = 0; i < all; i++)
		CHECK(!pthread_create(&thread[i], NULL, hammer, NULL));
	for (int i = 0; i < all; i++)
		pthread_join(thread[i], NULL);
	for (int i = 0; i < count; i++)
		CHECK(seen[i] == 1);
	CHECK(posted == count && completed == count && received == count);
	printf("%d threads, %d messages: %.2f us each\n", all, count, (seconds() - begin) / count * 1e6);
	CHECK(!ibv_destroy_qp(shared_qp) && !ibv_destroy_qp(peer) && !ibv_destroy_srq(shared_srq));
}

static void limits(void)
{
	struct ibv_mr *mr = region(memory(4096), 4096);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(mr && cq);
	struct ibv_qp *a = make_qp(cq, NULL, 16), *b = make_qp(cq, NULL, 16);
	connect_qp(a, gid, b->qp_num, 7);
	connect_qp(b, gid, a->qp_num, 7);

	/* A send queue that is full says so, and takes more when there is room. The peer has no receive: it is not ready. */
	int room = 0, failed;
	while (!(failed = post(a, IBV_WR_SEND, mr, NULL, (uint64_t)room)))
		CHECK(++room < 10000);
	CHECK(failed == ENOMEM && room >= 16);
	struct ibv_sge sge = { (uintptr_t)mr->addr + 64, 8, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	for (int done = 0, filled = 0; done < 2 * room;) {
		if (filled < room && !ibv_post_recv(b, &recv, &bad_recv))
			filled++;
		struct ibv_wc wc;
		int got = ibv_poll_cq(cq, 1, &wc);
		CHECK(got >= 0 && (!got || wc.status == IBV_WC_SUCCESS));
		done += got;
	}
	CHECK(!post(a, IBV_WR_RDMA_WRITE, mr, mr, 7));
	CHECK(one(cq).status == IBV_WC_SUCCESS);

	/* No receive, and no more retries. */
	struct ibv_qp *c = make_qp(cq, NULL, 16), *d = make_qp(cq, NULL, 16);
	connect_qp(c, gid, d->qp_num, 1);
	connect_qp(d, gid, c->qp_num, 1);
	CHECK(!post(c, IBV_WR_SEND, mr, NULL, 8));
	CHECK(one(cq).status == IBV_WC_RNR_RETRY_EXC_ERR);

	/* More completions than a queue holds: it and its queue pairs end, with an event each. */
	struct ibv_cq *small = ibv_create_cq(context, 1, NULL, NULL, 0);
	CHECK(small);
	struct ibv_qp *e = make_qp(small, NULL, 64), *f = make_qp(cq, NULL, 16);
	connect_qp(e, gid, f->qp_num, 7);
	connect_qp(f, gid, e->qp_num, 7);
	for (int i = 0; i < small->cqe + 8; i++)
		post(e, IBV_WR_RDMA_WRITE, mr, mr, (uint64_t)i);
	struct ibv_async_event event;
	int is_cq_told = 0;
	do {
		CHECK(!ibv_get_async_event(context, &event));
		is_cq_told |= event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == small;
		ibv_ack_async_event(&event);
	} while (!is_cq_told);

	/* Keys run out with an error, and come back. */
	struct ibv_device_attr attr;
	CHECK(!ibv_query_device(context, &attr));
	struct ibv_mr **all = calloc((size_t)attr.max_mr + 1, sizeof *all);
	CHECK(all);
	int count = 0;
	while (count <= attr.max_mr && (all[count] = region(mr->addr, 8)))
		count++;
	CHECK(errno == ENOMEM && count >= attr.max_mr - 16 && count < attr.max_mr);
	printf("%d regions and no more\n", count);
	CHECK(!ibv_dereg_mr(all[--count]) && (all[count++] = region(mr->addr, 8)));
	while (count)
		CHECK(!ibv_dereg_mr(all[--count]));
}

int main(int argc, char **argv)
{
	int first = argc > 2 ? atoi(argv[2]) : 0, second = argc > 3 ? atoi(argv[3]) : 0;
	const char *what = argc > 1 ? argv[1] : "";
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "processes")) {
		processes(first, second);
		return 0;
	}
	open_device();
	if (!strcmp(what, "objects"))
		objects(first, second);
	else if (!strcmp(what, "threads"))
		threads(first, second);
	else if (!strcmp(what, "limits"))
		limits();
	else
		return 2;
	return 0;
}
