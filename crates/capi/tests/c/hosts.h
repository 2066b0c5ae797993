/* Two processes on one host or on two, which tell each other how to connect. Needs a network namespace of its own. */
#ifndef HOSTS_H
#define HOSTS_H

#include "check.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* What the two processes tell each other. */
struct address {
	union ibv_gid gid;
	uint32_t qpn, psn;
	uint64_t va;
	uint32_t lkey, rkey;
};

/* On two hosts; by link-local addresses. */
static bool two, by_link;
/* This is the second process. It opens its device after the first one. */
static bool is_second;
/* The server is the second process, unless the roles are swapped. */
static bool is_server;
/* A socket to the other process. */
static int other;
/* What each process writes to standard output and to standard error. */
static FILE *said[2], *logged[2];

static void tell(const void *what, size_t len)
{
	EQ(write(other, what, len), len);
}

static bool hear(void *what, size_t len)
{
	return read(other, what, len) == (ssize_t)len;
}

/* Both processes have come here. */
static void meet(void)
{
	char c = 0;
	tell(&c, 1);
	hear(&c, 1);
}

/* Both have their addresses. The second process waits with what it does before it tells its own. */
static void exchange(struct address *peer, void (*make)(struct address *own))
{
	struct address own = { 0 };
	if (is_second)
		TRUE(hear(peer, sizeof *peer));
	make(&own);
	tell(&own, sizeof own);
	if (!is_second)
		TRUE(hear(peer, sizeof *peer));
}

/* The index of the address of this process. */
static int gid_index(struct ibv_context *ctx)
{
	union ibv_gid gid;
	uint8_t wanted[4] = { 127, 0, 0, 1 };
	if (two)
		memcpy(wanted, (uint8_t[]){ 10, 77, 0, is_second ? 2 : 1 }, 4);
	if (by_link)
		memcpy(wanted, (uint8_t[]){ 0, 0, 0, is_second ? 2 : 1 }, 4);
	for (int i = 0; i < 16; i++)
		if (!ibv_query_gid(ctx, 1, i, &gid) && !memcmp(gid.raw + 12, wanted, 4) && (gid.raw[0] == 0xfe) == by_link)
			return i;
	fail_at(__FILE__, __LINE__, "no such GID", 0, 0);
	return -1;
}

static int rtr(struct ibv_qp *qp, int index, const struct address *to, enum ibv_mtu mtu, uint32_t psn)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = to->qpn, .rq_psn = psn,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = to->gid, .sgid_index = index, .hop_limit = 64 } } };
	int mask = IBV_QP_STATE;
	if (qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return ibv_modify_qp(qp, &a, mask);
}

/* A network of its own for the second process, if there are two hosts. */
static void set_up_network(pid_t second)
{
	char setup[1024] = "ip link set lo up";
	if (two)
		snprintf(setup, sizeof setup,
			 "ip link set lo up && ip link add cable type veth peer name cable netns %d && ip addr add 10.77.0.1/24 dev cable && "
			 "echo 10 > /proc/sys/net/ipv4/neigh/cable/retrans_time_ms && ip link set cable up && "
			 "ip addr add fe80::1/64 dev cable nodad && "
			 "nsenter -n -t %d sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev cable; "
			 "echo 10 > /proc/sys/net/ipv4/neigh/cable/retrans_time_ms; "
			 "ip link set cable up; ip addr add fe80::2/64 dev cable nodad'",
			 second, second);
	OK(system(setup));
}

/* Starts one of the two processes. It says by one pipe that it is there, and waits for the other one. */
static pid_t start(bool second, bool serves, const int sockets[2], const int ready[2], const int go[2], void (*run)(void))
{
	said[second] = tmpfile(), logged[second] = tmpfile();
	TRUE(said[second] && logged[second]);
	pid_t pid = fork();
	if (pid)
		return pid;
	is_second = second, is_server = serves, other = sockets[second];
	close(sockets[!second]);
	dup2(fileno(said[second]), 1), dup2(fileno(logged[second]), 2);
	if (second && two)
		OK(unshare(CLONE_NEWNET));
	char c = 0;
	EQ(write(ready[1], &c, 1), 1);
	EQ(read(go[0], &c, 1), 1);
	run();
	exit(0);
}

/* Starts both: their process ids. */
static void begin_hosts(pid_t pids[2], bool is_swapped, void (*run)(void))
{
	int sockets[2], ready[2], go[2];
	OK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) || pipe(ready) || pipe(go));
	signal(SIGPIPE, SIG_IGN);
	setvbuf(stdout, NULL, _IONBF, 0);
	for (int n = 0; n < 2; n++)
		pids[n] = start(n, n != is_swapped, sockets, ready, go, run);
	close(sockets[0]), close(sockets[1]);
	char c[2] = { 0 };
	EQ(read(ready[0], c, 1), 1);
	EQ(read(ready[0], c, 1), 1);
	/* The network of the other host lives on when its process has ended. */
	char network[64];
	snprintf(network, sizeof network, "/proc/%d/ns/net", pids[1]);
	TRUE(open(network, O_RDONLY) >= 0);
	set_up_network(pids[1]);
	EQ(write(go[1], c, 2), 2);
}

/* Writes what stands in a file, with these words ahead of each line. */
static void copy(FILE *from, const char *before)
{
	char line[4096];
	rewind(from);
	while (fgets(line, sizeof line, from))
		dprintf(1, "%s%s", before, line);
}

#endif
