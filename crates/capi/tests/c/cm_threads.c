/* Threads that wait for events: cancelled, woken, and held up by acknowledgements; and ids of many threads. */
#include "cm.h"

#include <pthread.h>
#include <sys/wait.h>

static void *wait_for_event(void *c)
{
	struct rdma_cm_event *e;
	rdma_get_cm_event(c, &e);
	return c;
}

/* A cancelled reader takes nothing with it: the next one works. */
static void cancelled(void)
{
	for (int i = 0; i < 100; i++) {
		struct rdma_event_channel *c = channel();
		pthread_t reader;
		void *result;
		OK(pthread_create(&reader, NULL, wait_for_event, c));
		if (i % 2)
			usleep(1000);
		OK(pthread_cancel(reader));
		OK(pthread_join(reader, &result));
		TRUE(result == PTHREAD_CANCELED);
		int fd = c->fd;
		struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
		struct sockaddr_storage to = address("127.0.0.1", 1);
		OK(rdma_resolve_addr(id, NULL, sa(&to), 100));
		expect_ok(c, id, RDMA_CM_EVENT_ADDR_RESOLVED);
		OK(rdma_destroy_id(id));
		rdma_destroy_event_channel(c);
		/* Nothing is left of the channel. */
		MINUS_ONE(fcntl(fd, F_GETFD), EBADF);
	}
}

struct destroy {
	struct rdma_cm_id *id;
	_Atomic int done;
};

static void *destroy(void *arg)
{
	struct destroy *d = arg;
	OK(rdma_destroy_id(d->id));
	d->done = 1;
	return NULL;
}

static void destroying_waits_for_the_acknowledgement(void)
{
	struct rdma_event_channel *c = channel();
	struct destroy d = { new_id(c, NULL, RDMA_PS_TCP) };
	struct sockaddr_storage to = address("127.0.0.1", 1);
	pthread_t thread;
	OK(rdma_resolve_addr(d.id, NULL, sa(&to), 100));
	struct rdma_cm_event *e = expect(c, d.id, RDMA_CM_EVENT_ADDR_RESOLVED);
	OK(pthread_create(&thread, NULL, destroy, &d));
	usleep(50000);
	EQ(d.done, 0);
	OK(rdma_ack_cm_event(e));
	OK(pthread_join(thread, NULL));
	rdma_destroy_event_channel(c);
}

static void *connect_often(void *arg)
{
	(void)arg;
	for (int i = 0; i < 20; i++) {
		struct connection c = make_connection("127.0.0.1");
		talk(c.active, c.passive);
		end_connection(&c);
	}
	return NULL;
}

static void many_at_once(void)
{
	pthread_t threads[4];
	for (int i = 0; i < 4; i++)
		OK(pthread_create(&threads[i], NULL, connect_often, NULL));
	for (int i = 0; i < 4; i++)
		OK(pthread_join(threads[i], NULL));
}

/* What a forked child inherits does no work and does no harm; what it makes itself works. */
static void forked(void)
{
	struct connection c = make_connection("127.0.0.1");
	pid_t child = fork();
	if (child == 0) {
		struct rdma_cm_event *e;
		EQ(rdma_get_cm_event(c.active_channel, &e), -1);
		EQ(rdma_disconnect(c.active), -1);
		struct rdma_cm_id *id;
		EQ(rdma_create_id(c.active_channel, &id, NULL, RDMA_PS_TCP), -1);
		rdma_destroy_qp(c.active);
		OK(rdma_destroy_id(c.active));
		rdma_destroy_event_channel(c.active_channel);
		struct connection own = make_connection("127.0.0.1");
		TRUE(own.active->verbs != c.passive->verbs);
		talk(own.active, own.passive);
		end_connection(&own);
		_exit(0);
	}
	int status;
	TRUE(waitpid(child, &status, 0) == child);
	EQ(status, 0);
	talk(c.active, c.passive);
	end_connection(&c);
}

int main(void)
{
	cancelled();
	destroying_waits_for_the_acknowledgement();
	many_at_once();
	forked();
	return 0;
}
