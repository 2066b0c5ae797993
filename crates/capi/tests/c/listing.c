// ibv_get_device_list starts nothing: no thread, no descriptor, no signal handler. Whether the device can be opened shows when it is opened.
#include <assert.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct state {
	int tasks, descriptors;
	struct sigaction segv, bus;
};

static int entries(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;
	assert(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

static struct state now(void)
{
	struct state s;
	memset(&s, 0, sizeof(s));
	s.tasks = entries("/proc/self/task");
	s.descriptors = entries("/proc/self/fd");
	sigaction(SIGSEGV, NULL, &s.segv);
	sigaction(SIGBUS, NULL, &s.bus);
	return s;
}

static int same(const struct state *a, const struct state *b)
{
	return a->tasks == b->tasks && a->descriptors == b->descriptors &&
	       a->segv.sa_handler == b->segv.sa_handler && a->bus.sa_handler == b->bus.sa_handler;
}

int main(void)
{
	int port = atoi(getenv("ANYVERBS_UDP_PORT"));
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct state before = now(), after;
	int n = 0;

	struct ibv_device **list = ibv_get_device_list(&n);
	assert(list && n == 1 && list[0] && !list[1]);
	assert(strlen(ibv_get_device_name(list[0])) > 0);
	assert(ibv_get_device_guid(list[0]) != 0);
	assert(ibv_get_device_index(list[0]) == 0);
	struct ibv_device *device = list[0];
	ibv_free_device_list(list);
	after = now();
	assert(same(&before, &after));

	// Nobody has the port: it can be taken, by a socket that shares it with none.
	int taken = socket(AF_INET, SOCK_DGRAM, 0);
	assert(bind(taken, (struct sockaddr *)&any, sizeof(any)) == 0);
	list = ibv_get_device_list(&n);
	assert(list && n == 1 && list[0] == device);
	ibv_free_device_list(list);
	errno = 0;
	assert(!ibv_open_device(device) && errno == EADDRINUSE);
	close(taken);

	struct ibv_context *context = ibv_open_device(device);
	assert(context);
	after = now();
	assert(!same(&before, &after));
	struct ibv_device_attr attr;
	assert(ibv_query_device(context, &attr) == 0);
	assert(attr.node_guid == ibv_get_device_guid(device));
	assert(ibv_close_device(context) == 0);
	return 0;
}
