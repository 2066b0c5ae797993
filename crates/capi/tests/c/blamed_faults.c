/* A request that fails because of a rule about packets says so: the rule in its reason, 9901 in vendor_err, a line of the log. One that
 * fails for another reason does not, whatever rules there are. */
#include "check.h"

#include <unistd.h>

struct fault {
	const char *script;
	/* Both within a process: by its queue, or by UDP. */
	const char *inproc;
	/* The peer stays in INIT. */
	bool is_late;
	int status, vendor_err;
	/* The reason in the log of the failure begins with this. */
	const char *reason;
	/* Another line, that comes this often; or none. */
	const char *line;
	int times;
};

#define LINE "injected fault (line 1 of the script): "
#define QP_1 LINE "queue pair 1 ("

static const struct fault faults[] = {
	{ "on qp 1: limit packets to 1kb/s", "1", false, 12, 9901, LINE "its packet waits for ", QP_1, 1 },
	{ "on qp 1: limit packets to 1kb/s", "0", false, 12, 9901, LINE "its packet waits for ", "packet 1 waits", 1 },
	{ "on qp 1: delay packets by 30s", "0", false, 12, 9901, LINE "its packet waits for ", "packet 1 is late", 1 },
	{ "on qp 1: drop packets", "1", false, 12, 9901, LINE "its packet was lost ", "packet 1 is lost", 1 },
	{ "on qp 1: drop received packets", "0", false, 12, 9901, LINE "the answer of the peer was lost", "packet 1 is lost", 1 },
	{ "down after 0s", "1", false, 12, 9901, LINE "its packet was lost ", QP_1, 1 },
	{ "down after 0s", "0", false, 12, 9901, LINE "its packet was lost ", "port of anyverbs0 is down", 2 },
	{ "on qp 2: drop received packets", "1", false, 12, 9901, "a script of faults of the peer's process asked for it", NULL, 0 },
	{ "on qp 2: corrupt received packets", "0", false, 12, 9901, "a script of faults of the peer's process asked for it", NULL, 0 },
	{ "on qp 2: rnr received packets", "1", false, 13, 9901, "a script of faults of the peer's process asked for it", NULL, 0 },
	{ "on qp 2: rnr received packets", "0", false, 13, 9901, "a script of faults of the peer's process asked for it", NULL, 0 },
	/* Real ones. */
	{ "on qp 1: delay packets by 1us", "0", true, 12, 1206, "the peer's queue pair is not ready to receive", NULL, 0 },
	{ "on qp 2: rnr received packet 1", "1", false, 13, 1301, "the peer's program ", NULL, 0 },
};

static void to_rts_soon(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = 10, .retry_cnt = 2, .rnr_retry = 2, .max_rd_atomic = 4 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Sends once, and prints how that fails. */
static void send_once(bool is_late, bool has_receive)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	to_init(a.qp), to_init(b.qp);
	if (has_receive)
		OK(post_recv(&b, 1, 64));
	to_rtr(a.qp, b.qp->qp_num);
	if (!is_late)
		to_rtr(b.qp, a.qp->qp_num);
	to_rts_soon(a.qp);
	OK(post_send(&a, 7, 8, IBV_SEND_SIGNALED));
	struct ibv_wc wc = poll_one(a.cq);
	printf("status %d, vendor_err %d\n", wc.status, wc.vendor_err);
	fflush(stdout);
	free_end(&a), free_end(&b);
}

static void check(const struct fault *fault, const char *self)
{
	char command[5000], line[4096], wanted[64];
	int lines = 0, reasons = 0, ends = 0;
	snprintf(command, sizeof command, "ANYVERBS_INPROC=%s ANYVERBS_FAULTS='%s' '%s' %d %d 2>&1", fault->inproc, fault->script, self,
		 fault->is_late, fault->vendor_err != 1301);
	snprintf(wanted, sizeof wanted, "status %d, vendor_err %d\n", fault->status, fault->vendor_err);
	FILE *child = popen(command, "r");
	TRUE(child != NULL);
	while (fgets(line, sizeof line, child) != NULL) {
		fputs(line, stderr);
		const char *reason = strstr(line, "_EXC_ERR): ");
		if (reason != NULL) {
			reasons++;
			TRUE(strncmp(strstr(reason, ": ") + 2, fault->reason, strlen(fault->reason)) == 0);
		} else if (fault->line != NULL && strstr(line, fault->line) != NULL) {
			lines++;
		}
		ends += strcmp(line, wanted) == 0;
	}
	OK(pclose(child));
	EQ(reasons, 1);
	EQ(ends, 1);
	EQ(lines, fault->times);
}

int main(int argc, char **argv)
{
	char self[4096] = {0};
	if (argc > 2) {
		send_once(atoi(argv[1]), atoi(argv[2]));
		return 0;
	}
	TRUE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
	for (size_t n = 0; n < sizeof faults / sizeof faults[0]; n++) {
		fprintf(stderr, "%s, ANYVERBS_INPROC=%s\n", faults[n].script, faults[n].inproc);
		check(&faults[n], self);
	}
	return 0;
}
