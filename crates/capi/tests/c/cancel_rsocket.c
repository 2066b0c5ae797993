/* Calls of rsockets are cancellation points while they wait, as those of sockets, and nowhere else. A thread that is cancelled
   leaves no lock, and no other sleeper behind. */
#include "check.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>
#include <unistd.h>

/* Newer than the installed header. */
static int (*repoll_create)(int size);
static int (*repoll_ctl)(int epfd, int op, int fd, struct epoll_event *event);
static int (*repoll_wait)(int epfd, struct epoll_event *events, int most, int timeout);
static void *find(const char *symbol)
{
	void *found = dlsym(RTLD_DEFAULT, symbol);
	TRUE(found != NULL);
	return found;
}

static int lfd, a, b, bound, epfd;
static struct sockaddr_in name;
static char big[1 << 20];

struct call {
	void (*body)(void);
	bool pending, finished;
};

static void *make(void *arg)
{
	struct call *call = arg;
	if (call->pending)
		OK(pthread_cancel(pthread_self()));
	call->body();
	call->finished = true;
	for (;;)
		pthread_testcancel();
	return NULL;
}

/* Makes a call by a thread of its own, whose cancellation is pending from the beginning. It has to finish the call. */
static void step(const char *what, void (*body)(void))
{
	struct call call = { body, true, false };
	pthread_t thread;
	void *result;
	OK(pthread_create(&thread, NULL, make, &call));
	OK(pthread_join(thread, &result));
	TRUE(result == PTHREAD_CANCELED);
	if (!call.finished) {
		fprintf(stderr, "%s was cancelled in the middle\n", what);
		exit(1);
	}
}
#define STEP(what) step(#what, what)

/* Makes a call that waits. It is cancelled once before it waits, and once while it does. */
static void cancelled(const char *what, void (*body)(void))
{
	for (int pending = 0; pending < 2; pending++) {
		struct call call = { body, pending, false };
		pthread_t thread;
		void *result;
		struct timespec end;
		OK(pthread_create(&thread, NULL, make, &call));
		usleep(20000);
		if (!pending)
			OK(pthread_cancel(thread));
		OK(clock_gettime(CLOCK_REALTIME, &end));
		end.tv_sec += 10;
		if (pthread_timedjoin_np(thread, &result, &end) != 0) {
			fprintf(stderr, "%s waits on\n", what);
			exit(1);
		}
		TRUE(result == PTHREAD_CANCELED);
		if (call.finished) {
			fprintf(stderr, "%s did not wait\n", what);
			exit(1);
		}
	}
}
#define CANCELLED(what) cancelled(#what, what)

static void make_listener(void)
{
	TRUE((lfd = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
}
static void bind_it(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	socklen_t len = sizeof name;
	inet_pton(AF_INET, "127.0.0.1", &any.sin_addr);
	OK(rbind(lfd, (struct sockaddr *)&any, sizeof any));
	OK(rgetsockname(lfd, (struct sockaddr *)&name, &len));
}
static void listen_it(void) { OK(rlisten(lfd, 4)); }
static void options(void)
{
	int value = 1;
	socklen_t len = sizeof value;
	OK(rsetsockopt(lfd, SOL_SOCKET, SO_REUSEADDR, &value, sizeof value));
	OK(rgetsockopt(lfd, SOL_SOCKET, SO_ERROR, &value, &len));
}
static void accept_none(void) { raccept(lfd, NULL, NULL); }
static void poll_none(void)
{
	struct pollfd fd = { lfd, POLLIN, 0 };
	rpoll(&fd, 1, -1);
}
static void select_none(void)
{
	fd_set set;
	FD_ZERO(&set);
	FD_SET(lfd, &set);
	rselect(lfd + 1, &set, NULL, NULL, NULL);
}
static void make_epoll(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	TRUE((epfd = repoll_create(1)) >= 0);
	OK(repoll_ctl(epfd, EPOLL_CTL_ADD, lfd, &event));
}
static void epoll_none(void)
{
	struct epoll_event event;
	repoll_wait(epfd, &event, 1, -1);
}
static void dial(void)
{
	TRUE((a = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	OK(rfcntl(a, F_SETFL, O_NONBLOCK));
	MINUS_ONE(rconnect(a, (struct sockaddr *)&name, sizeof name), EINPROGRESS);
}
static void until(int fd, short events)
{
	struct pollfd set = { fd, events, 0 };
	EQ(rpoll(&set, 1, 10000), 1);
}
static void accept_it(void) { TRUE((b = raccept(lfd, NULL, NULL)) >= 0); }
static void send_it(void) { EQ(rsend(a, "x", 1, 0), 1); }
static void receive_it(void)
{
	char c;
	EQ(rrecv(b, &c, 1, 0), 1);
	EQ(c, 'x');
}
static void receive_none(void)
{
	char c;
	rrecv(b, &c, 1, 0);
}
static void read_none(void)
{
	char c;
	rread(b, &c, 1);
}
/* Nobody receives this. */
static void send_too_much(void)
{
	for (;;)
		rsend(a, big, sizeof big, 0);
}
static void shut_it(void) { OK(rshutdown(a, SHUT_RDWR)); }
static void close_all(void) { OK(rclose(a)); OK(rclose(b)); OK(rclose(epfd)); OK(rclose(lfd)); }

static void make_datagrams(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	inet_pton(AF_INET, "127.0.0.1", &any.sin_addr);
	TRUE((bound = rsocket(AF_INET, SOCK_DGRAM, 0)) >= 0);
	OK(rbind(bound, (struct sockaddr *)&any, sizeof any));
}
static void receive_no_datagram(void)
{
	char c;
	rrecvfrom(bound, &c, 1, 0, NULL, NULL);
}
static void close_datagrams(void) { OK(rclose(bound)); }

static double cpu_of_a_wait(void)
{
	struct timespec begin, end;
	struct timeval timeout = { .tv_usec = 300000 };
	char c;
	OK(rsetsockopt(b, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout));
	OK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin));
	MINUS_ONE(rrecv(b, &c, 1, 0), EAGAIN);
	OK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end));
	timeout.tv_usec = 0;
	OK(rsetsockopt(b, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout));
	return (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
}

int main(void)
{
	repoll_create = find("repoll_create"), repoll_ctl = find("repoll_ctl"), repoll_wait = find("repoll_wait");
	STEP(make_listener), STEP(bind_it), STEP(options), STEP(listen_it), STEP(make_epoll);
	CANCELLED(accept_none), CANCELLED(poll_none), CANCELLED(select_none), CANCELLED(epoll_none);
	STEP(dial);
	until(lfd, POLLIN), STEP(accept_it), until(a, POLLOUT);
	STEP(send_it), until(b, POLLIN), STEP(receive_it);
	CANCELLED(receive_none), CANCELLED(read_none);
	/* An event that came to a cancelled sleeper is read by the next one. */
	STEP(send_it), until(b, POLLIN), STEP(receive_it);
	double cpu = cpu_of_a_wait();
	if (cpu > 0.1) {
		fprintf(stderr, "a wait of 0.3 s took %.3f s of the processor\n", cpu);
		return 1;
	}
	OK(rfcntl(a, F_SETFL, 0));
	CANCELLED(send_too_much);
	/* The lock of the sends is free, and so is that of the receives. */
	OK(rfcntl(a, F_SETFL, O_NONBLOCK));
	MINUS_ONE(rsend(a, "y", 1, 0), EAGAIN);
	char c[4096];
	EQ(rrecv(b, c, sizeof c, MSG_WAITALL), sizeof c);
	OK(rfcntl(b, F_SETFL, O_NONBLOCK));
	for (;;) {
		struct pollfd set = { b, POLLIN, 0 };
		if (rpoll(&set, 1, 100) == 0)
			break;
		TRUE(rrecv(b, big, sizeof big, 0) > 0);
	}
	STEP(shut_it), STEP(close_all);
	STEP(make_datagrams);
	CANCELLED(receive_no_datagram);
	STEP(close_datagrams);
	/* All of it is gone: a descriptor is free again only when nobody holds the socket. */
	EQ(fcntl(a, F_GETFD), -1);
	EQ(fcntl(b, F_GETFD), -1);
	EQ(fcntl(epfd, F_GETFD), -1);
	EQ(fcntl(lfd, F_GETFD), -1);
	EQ(fcntl(bound, F_GETFD), -1);
	return 0;
}
