/* However programs wait for completion events, and however many of their threads do, each event arrives. */
#include "check.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>

struct link {
	struct end a, b;
	struct ibv_comp_channel *channel;
	atomic_int got;
};

static struct link make_link(struct ibv_pd *pd, struct ibv_comp_channel *channel)
{
	struct link l = { make_end(pd, IBV_QPT_RC), make_end(pd, IBV_QPT_RC), channel, 0 };
	if (!l.channel)
		l.channel = ibv_create_comp_channel(pd->context);
	return l;
}

/* After it has its place: events carry its address. */
static void connect_link(struct ibv_pd *pd, struct link *l)
{
	OK(ibv_destroy_qp(l->b.qp));
	OK(ibv_destroy_cq(l->b.cq));
	l->b.cq = ibv_create_cq(pd->context, 32, l, l->channel, 0);
	l->b.qp = make_qp(pd, l->b.cq, IBV_QPT_RC, NULL, 0);
	connect_ends(&l->a, &l->b);
	for (int i = 0; i < 8; i++)
		OK(post_recv(&l->b, i, 64));
	OK(ibv_req_notify_cq(l->b.cq, 0));
}

/* Sends one message, and waits without polling until it was received. */
static void send_one(struct link *l)
{
	int before = l->got;
	OK(post_send(&l->a, 1, 8, IBV_SEND_SIGNALED));
	for (double until = now() + 5; l->got == before; usleep(20))
		TRUE(now() < until);
	EQ(poll_one(l->a.cq).status, IBV_WC_SUCCESS);
}

/* What programs do with an event. */
static void take(struct ibv_cq *cq, void *context)
{
	struct link *l = context;
	struct ibv_wc wc;
	ibv_ack_cq_events(cq, 1);
	OK(ibv_req_notify_cq(cq, 0));
	while (ibv_poll_cq(cq, 1, &wc) == 1) {
		EQ(wc.status, IBV_WC_SUCCESS);
		OK(post_recv(&l->b, 1, 64));
		l->got++;
	}
}

static void get(struct ibv_comp_channel *channel)
{
	struct ibv_cq *cq;
	void *context;
	OK(ibv_get_cq_event(channel, &cq, &context));
	take(cq, context);
}

/* The threads end by cancellation, while they wait. */
static void *wait_for_ever(void *channel)
{
	for (;;)
		get(channel);
	return NULL;
}

/* As a program whose loop waits now here, now there. */
static void *wait_in_turns(void *channel)
{
	struct pollfd p = { ((struct ibv_comp_channel *)channel)->fd, POLLIN, 0 };
	for (int i = 0;; i++) {
		if (i % 3 == 0 || i % 7 == 0)
			EQ(poll(&p, 1, -1), 1);
		get(channel);
	}
	return NULL;
}

static pthread_t start(void *(*f)(void *), void *arg)
{
	pthread_t thread;
	OK(pthread_create(&thread, NULL, f, arg));
	return thread;
}

static void stop(pthread_t thread)
{
	OK(pthread_cancel(thread));
	OK(pthread_join(thread, NULL));
}

static void one_thread(struct link *l, void *(*f)(void *))
{
	pthread_t thread = start(f, l->channel);
	for (int i = 0; i < 300; i++) {
		send_one(l);
		/* Shorter and longer than what it looks for, and than the worker stays away. */
		if (i % 4)
			usleep(i * 37 % 2000);
	}
	usleep(1000);
	stop(thread);
}

static void several_threads(struct link *links, int n)
{
	pthread_t threads[8];
	/* The last channel has two. */
	for (int i = 0; i <= n; i++)
		threads[i] = start(wait_for_ever, links[i < n ? i : n - 1].channel);
	for (int round = 0; round < 200; round++) {
		int before[8];
		for (int i = 0; i < n; i++) {
			before[i] = links[i].got;
			OK(post_send(&links[i].a, 1, 8, IBV_SEND_SIGNALED));
		}
		for (int i = 0; i < n; i++) {
			for (double until = now() + 5; links[i].got == before[i]; usleep(20))
				TRUE(now() < until);
			EQ(poll_one(links[i].a.cq).status, IBV_WC_SUCCESS);
		}
		usleep(round * 31 % 1500);
	}
	usleep(1000);
	for (int i = 0; i <= n; i++)
		stop(threads[i]);
	/* A thread alone is served as before. */
	one_thread(&links[0], wait_for_ever);
}

static void *wait_at_epoll(void *arg)
{
	struct link *l = arg;
	int epoll = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN };
	OK(epoll_ctl(epoll, EPOLL_CTL_ADD, l->channel->fd, &e));
	while (l->got < 200) {
		struct ibv_cq *cq;
		void *context;
		EQ(epoll_wait(epoll, &e, 1, -1), 1);
		/* Readable exactly while there is an event. */
		OK(ibv_get_cq_event(l->channel, &cq, &context));
		MINUS_ONE(ibv_get_cq_event(l->channel, &cq, &context), EAGAIN);
		EQ(epoll_wait(epoll, &e, 1, 0), 0);
		take(cq, context);
	}
	close(epoll);
	return NULL;
}

static void without_blocking(struct link *l)
{
	int flags = fcntl(l->channel->fd, F_GETFL);
	OK(fcntl(l->channel->fd, F_SETFL, flags | O_NONBLOCK));
	l->got = 0;
	pthread_t thread = start(wait_at_epoll, l);
	for (int i = 0; i < 200; i++) {
		send_one(l);
		usleep(i * 37 % 2000);
	}
	OK(pthread_join(thread, NULL));
	OK(fcntl(l->channel->fd, F_SETFL, flags));
}

static void nothing(int signal)
{
	(void)signal;
}

static void *expect_interrupt(void *channel)
{
	struct ibv_cq *cq;
	void *context;
	MINUS_ONE(ibv_get_cq_event(channel, &cq, &context), EINTR);
	return NULL;
}

/* As read(2) on the descriptor would: handlers with SA_RESTART do not end the wait, others do. */
static void signals(struct link *l)
{
	struct sigaction restart = { .sa_handler = nothing, .sa_flags = SA_RESTART }, end = { .sa_handler = nothing };
	OK(sigaction(SIGUSR1, &restart, NULL));
	pthread_t thread = start(wait_for_ever, l->channel);
	for (int i = 0; i < 20; i++) {
		usleep(2000);
		OK(pthread_kill(thread, SIGUSR1));
		send_one(l);
	}
	usleep(2000);
	stop(thread);
	OK(sigaction(SIGUSR2, &end, NULL));
	thread = start(expect_interrupt, l->channel);
	usleep(20000);
	OK(pthread_kill(thread, SIGUSR2));
	OK(pthread_join(thread, NULL));
}

int main(void)
{
	/* Through the sockets, as between two hosts. */
	setenv("ANYVERBS_INPROC", "false", 1);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct link links[4];
	for (int i = 0; i < 4; i++) {
		/* The last two share a channel. */
		links[i] = make_link(pd, i == 3 ? links[2].channel : NULL);
		connect_link(pd, &links[i]);
	}
	one_thread(&links[0], wait_for_ever);
	one_thread(&links[1], wait_in_turns);
	several_threads(links, 4);
	without_blocking(&links[1]);
	signals(&links[0]);
	return 0;
}
