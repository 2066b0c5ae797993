/* What is logged at exit comes out, though the thread has logged before and lost its thread-local data since. So does what a script
 * of faults did to the last messages. */
#include "check.h"

#include <unistd.h>

/* The ACK of the message leaves once more at exit. */
static void receive_one(void)
{
	struct ibv_pd *pd = ibv_alloc_pd(open_device());
	TRUE(pd != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 64));
	OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
	poll_one(a.cq), poll_one(b.cq);
}

static void check_faults(const char *self)
{
	static const char script[] = "on qp 2: drop ack packet 2";
	char command[5000], line[4096];
	unsigned lost = 0;
	snprintf(command, sizeof command, "ANYVERBS_FAULTS='%s' '%s' receives 2>&1", script, self);
	FILE *child = popen(command, "r");
	TRUE(child != NULL);
	while (fgets(line, sizeof line, child) != NULL)
		lost += strstr(line, "sent packet 2 is lost: ") != NULL;
	OK(pclose(child));
	EQ(lost, 1);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		if (strcmp(argv[1], "receives") == 0)
			receive_one();
		else
			TRUE(open_device() != NULL);
		exit(0);
	}
	char self[4096] = {0}, command[5000], line[4096];
	TRUE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
	check_faults(self);
	snprintf(command, sizeof command, "ANYVERBS_LOG=info '%s' child 2>&1", self);
	FILE *child = popen(command, "r");
	TRUE(child != NULL);
	bool opened = false, counted = false;
	while (fgets(line, sizeof line, child) != NULL) {
		opened |= strstr(line, "is open") != NULL;
		counted |= strstr(line, "anyverbs::counters") != NULL;
	}
	OK(pclose(child));
	TRUE(opened);
	TRUE(counted);
	return 0;
}
