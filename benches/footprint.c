/* What the device costs a process: memory of the idle engine, memory of a connected RC queue pair, CPU while idle.
 * Prints three lines "name value": engine_kib, qp_bytes, idle_cpu_percent. Build with -libverbs. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { QPS = 1000, IDLE_SECONDS = 3 };

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* Resident memory in KiB. */
static long resident(void)
{
	char line[256];
	long kib = -1;
	FILE *f = fopen("/proc/self/status", "r");

	if (!f)
		fail("/proc/self/status");
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "VmRSS: %ld", &kib) == 1)
			break;
	fclose(f);
	return kib;
}

static double cpu_seconds(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	if (!qp)
		fail("ibv_create_qp");
	return qp;
}

static void connect_to(struct ibv_qp *qp, uint32_t peer, const union ibv_gid *gid)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};

	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		fail("INIT");
	memset(&a, 0, sizeof(a));
	a.qp_state = IBV_QPS_RTR;
	a.path_mtu = IBV_MTU_1024;
	a.dest_qp_num = peer;
	a.max_dest_rd_atomic = 1;
	a.min_rnr_timer = 12;
	a.ah_attr.is_global = 1;
	a.ah_attr.grh.dgid = *gid;
	a.ah_attr.grh.hop_limit = 64;
	a.ah_attr.port_num = 1;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		fail("RTR");
	memset(&a, 0, sizeof(a));
	a.qp_state = IBV_QPS_RTS;
	a.timeout = 14;
	a.retry_cnt = 7;
	a.rnr_retry = 7;
	a.max_rd_atomic = 1;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					  IBV_QP_MAX_QP_RD_ATOMIC))
		fail("RTS");
}

int main(void)
{
	static struct ibv_qp *qps[QPS];
	struct ibv_device **list = ibv_get_device_list(NULL);
	union ibv_gid gid;
	long before, after;

	if (!list || !list[0]) {
		fprintf(stderr, "no device\n");
		return 1;
	}
	before = resident();
	struct ibv_context *context = ibv_open_device(list[0]);
	if (!context)
		fail("ibv_open_device");
	after = resident();
	printf("engine_kib %ld\n", after - before);

	if (ibv_query_gid(context, 1, 0, &gid))
		fail("ibv_query_gid");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 1024, NULL, NULL, 0);
	if (!pd || !cq)
		fail("PD or CQ");

	/* The first pair pays for what all share. */
	struct ibv_qp *first = create(pd, cq), *second = create(pd, cq);
	connect_to(first, second->qp_num, &gid);
	connect_to(second, first->qp_num, &gid);
	before = resident();
	for (int i = 0; i < QPS; i++)
		qps[i] = create(pd, cq);
	for (int i = 0; i < QPS; i++)
		connect_to(qps[i], qps[i ^ 1]->qp_num, &gid);
	after = resident();
	printf("qp_bytes %ld\n", (after - before) * 1024 / QPS);

	double cpu = cpu_seconds();
	sleep(IDLE_SECONDS);
	printf("idle_cpu_percent %.4f\n", (cpu_seconds() - cpu) * 100 / IDLE_SECONDS);
	return 0;
}
