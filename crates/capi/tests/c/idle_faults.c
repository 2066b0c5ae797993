/* At the end of a process the log names the rules of its script that never did anything, and a process that opened no device is quiet.
 * Rules do not count queue pairs for raw packets, and the log says so. */
#include "check.h"

#include <unistd.h>

static void use_device(void)
{
	struct ibv_context *ctx = open_device();
	IS_NULL(ibv_alloc_pd(ctx), EIO);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	for (int n = 0; n < 2; n++) {
		OK(post_recv(&b, 1, 64));
		OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
		poll_one(a.cq), poll_one(b.cq);
	}
	free_end(&a), free_end(&b);
}

/* One that makes a queue pair for raw packets has what it needs, or no right to make one. */
static void use_raw(void)
{
	struct ibv_pd *pd = ibv_alloc_pd(open_device());
	TRUE(pd != NULL);
	struct ibv_cq *cq = ibv_create_cq(pd->context, 1, NULL, NULL, 0);
	TRUE(cq != NULL);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (qp == NULL) {
		EQ(errno, EPERM);
		printf("no raw packets\n");
	}
}

static void check_raw(const char *self)
{
	char command[5000], line[4096];
	bool is_told = false, is_skipped = false;
	snprintf(command, sizeof command, "ANYVERBS_FAULTS='on qp 1: drop packet 1' '%s' raw 2>&1", self);
	FILE *child = popen(command, "r");
	TRUE(child != NULL);
	while (fgets(line, sizeof line, child) != NULL) {
		is_told |= strstr(line, "; the process had 0 queue pairs and 1 raw queue pair, and the rule does not hold for raw packets\n") != NULL;
		is_skipped |= strcmp(line, "no raw packets\n") == 0;
	}
	OK(pclose(child));
	TRUE(is_told != is_skipped);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		int count;
		if (strcmp(argv[1], "uses") == 0)
			use_device();
		else if (strcmp(argv[1], "raw") == 0)
			use_raw();
		else
			ibv_free_device_list(ibv_get_device_list(&count));
		return 0;
	}
	static const char script[] = "ibv_alloc_pd 1 fails with EIO; ibv_reg_mr 70 fails with ENOMEM\n"
		"on qp 1: delay packet 1 by 1us; limit send packets to 10Gb/s\n"
		"on qp 9: drop packet 1";
	static const char *const named[] = {
		"(line 1 of the script, rule 2): ibv_reg_mr 70 fails with ENOMEM\n",
		"(line 3 of the script): on qp 9: drop packet 1; the process had 2 queue pairs\n",
	};
	for (int uses = 0; uses < 2; uses++) {
		char self[4096] = {0}, command[5000], line[4096];
		unsigned found = 0;
		TRUE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
		snprintf(command, sizeof command, "ANYVERBS_FAULTS='%s' '%s' %s 2>&1", script, self, uses ? "uses" : "lists");
		FILE *child = popen(command, "r");
		TRUE(child != NULL);
		while (fgets(line, sizeof line, child) != NULL) {
			const char *told = strstr(line, "faults: a rule never did anything ");
			if (told == NULL)
				continue;
			TRUE(uses && found < 2);
			TRUE(strcmp(strchr(told, '('), named[found]) == 0);
			found++;
		}
		OK(pclose(child));
		EQ(found, 2 * uses);
		check_raw(self);
	}
	return 0;
}
