/* Requests that come back to back, and programs that keep the last one only. */
#include "cm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>

enum { CLIENTS = 16 };

/* A listener whom all clients have asked: their requests wait. */
struct asked {
	struct rdma_event_channel *channel, *clients_channel;
	struct rdma_cm_id *listener, *clients[CLIENTS], *requests[CLIENTS];
};

/* A number that the kernel tells of a descriptor. */
static unsigned fdinfo(int fd, const char *format)
{
	char line[128];
	unsigned number = 0;
	snprintf(line, sizeof line, "/proc/self/fdinfo/%d", fd);
	FILE *f = fopen(line, "r");
	TRUE(f != NULL);
	while (fgets(line, sizeof line, f))
		sscanf(line, format, &number);
	fclose(f);
	return number;
}

/* A channel's descriptor is one of epoll, and holds the one that counts. */
static int events_that_wait(struct rdma_event_channel *c)
{
	return fdinfo(fdinfo(c->fd, "tfd: %u"), "eventfd-count: %x");
}

static struct asked ask(void)
{
	struct asked a = { channel(), channel() };
	a.listener = new_id(a.channel, NULL, RDMA_PS_TCP);
	struct sockaddr_storage at = address("127.0.0.1", 0);
	OK(rdma_bind_addr(a.listener, sa(&at)));
	OK(rdma_listen(a.listener, CLIENTS));
	for (int i = 0; i < CLIENTS; i++) {
		struct rdma_conn_param param = { .qp_num = 100 + i, .retry_count = 7 };
		a.clients[i] = new_id(a.clients_channel, NULL, RDMA_PS_TCP);
		resolve(a.clients[i], "127.0.0.1", ntohs(rdma_get_src_port(a.listener)));
		OK(rdma_connect(a.clients[i], &param));
	}
	while (events_that_wait(a.channel) < CLIENTS)
		usleep(1000);
	return a;
}

static void end(struct asked *a)
{
	for (int i = 0; i < CLIENTS; i++) {
		OK(rdma_destroy_id(a->requests[i]));
		OK(rdma_destroy_id(a->clients[i]));
	}
	OK(rdma_destroy_id(a->listener));
	rdma_destroy_event_channel(a->channel);
	rdma_destroy_event_channel(a->clients_channel);
}

/* The next event: the id of a request, or NULL for an event of the program's own. */
static struct rdma_cm_id *next(struct asked *a)
{
	struct rdma_cm_event *e;
	OK(rdma_get_cm_event(a->channel, &e));
	struct rdma_cm_id *id = e->event == RDMA_CM_EVENT_CONNECT_REQUEST ? e->id : NULL;
	TRUE(id || (int)e->event == RDMA_CM_EVENT_USER);
	OK(rdma_ack_cm_event(e));
	return id;
}

/* An event of the program's own: newer than the headers of Debian 12. */
static int write_event(struct rdma_cm_id *id)
{
	int (*write_cm_event)(struct rdma_cm_id *, int, int, uint64_t) = dlsym(RTLD_DEFAULT, "rdma_write_cm_event");
	return write_cm_event(id, RDMA_CM_EVENT_USER, 0, 0);
}

static struct rdma_cm_id *last;
static sem_t stored;

static void *store(void *a)
{
	for (int i = 0; i < CLIENTS; i++) {
		last = next(a);
		OK(sem_post(&stored));
	}
	return NULL;
}

/* The event thread leaves each request where another thread fetches it: none is lost. */
static void stored_and_fetched(void)
{
	struct asked a = ask();
	pthread_t thread;
	OK(sem_init(&stored, 0, 0));
	OK(pthread_create(&thread, NULL, store, &a));
	for (int i = 0; i < CLIENTS; i++) {
		OK(sem_wait(&stored));
		a.requests[i] = last;
		for (int j = 0; j < i; j++)
			TRUE(a.requests[j] != a.requests[i]);
		OK(rdma_reject(a.requests[i], NULL, 0));
	}
	OK(pthread_join(thread, NULL));
	end(&a);
}

/* Who collects requests waits three times; other events do not wait with them. */
static void collected(void)
{
	struct asked a = ask();
	struct rdma_cm_id *other = new_id(a.channel, NULL, RDMA_PS_TCP);
	a.requests[0] = next(&a);
	OK(write_event(other));
	TRUE(next(&a) == NULL);
	for (int i = 1; i < 4; i++)
		a.requests[i] = next(&a);
	OK(write_event(other));
	for (int i = 4; i < CLIENTS; i++) {
		a.requests[i] = next(&a);
		TRUE(a.requests[i] != NULL);
	}
	TRUE(next(&a) == NULL);
	OK(rdma_destroy_id(other));
	end(&a);
}

/* A request that was given a context, or called with, is with the program; who does not wait for events need not wait at all. */
static void taken_up(void)
{
	struct asked a = ask();
	int flags = fcntl(a.channel->fd, F_GETFL);
	struct rdma_cm_id *other = new_id(a.channel, NULL, RDMA_PS_TCP);
	OK(write_event(other));
	for (int i = 0; i < CLIENTS; i++) {
		a.requests[i] = next(&a);
		TRUE(a.requests[i] != NULL);
		if (i < 4)
			a.requests[i]->context = &a;
		else if (i < 8)
			OK(rdma_reject(a.requests[i], NULL, 0));
		else
			OK(fcntl(a.channel->fd, F_SETFL, flags | O_NONBLOCK));
	}
	TRUE(next(&a) == NULL);
	OK(rdma_destroy_id(other));
	end(&a);
}

int main(void)
{
	stored_and_fetched();
	collected();
	taken_up();
	return 0;
}
