/* Plain socket calls, which the preloaded object takes to rsockets: server and client are two threads. Says nothing and
 * returns 0, or names the line. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define EQ(got, want)                                                                                       \
	do {                                                                                                \
		long g_ = (long)(got), w_ = (long)(want);                                                   \
		if (g_ != w_) {                                                                             \
			printf("%s:%d: %s: got %ld (errno %d), want %ld\n", __FILE__, __LINE__, #got, g_, \
			       errno, w_);                                                                  \
			exit(1);                                                                            \
		}                                                                                           \
	} while (0)
#define OK(call) EQ(call, 0)
#define TRUE(cond) EQ(!!(cond), 1)
#define MINUS_ONE(call, error)     \
	do {                       \
		errno = 0;         \
		EQ(call, -1);      \
		EQ(errno, error);  \
	} while (0)

static struct sockaddr_in target;

/* Whether there is an rsocket beside a descriptor: only that knows this option (RDMA_SQSIZE). */
static bool is_rsocket(int fd)
{
	int value;
	socklen_t len = sizeof value;
	return getsockopt(fd, 0x10000, 0, &value, &len) == 0;
}

static int listener(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	socklen_t len = sizeof target;
	TRUE(fd >= 0 && is_rsocket(fd));
	OK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
	memset(&target, 0, sizeof target);
	target.sin_family = AF_INET;
	inet_pton(AF_INET, "127.0.0.1", &target.sin_addr);
	OK(bind(fd, (struct sockaddr *)&target, sizeof target));
	OK(listen(fd, 4));
	OK(getsockname(fd, (struct sockaddr *)&target, &len));
	return fd;
}

static void *dial(void *arg)
{
	OK(connect(*(int *)arg, (struct sockaddr *)&target, sizeof target));
	return NULL;
}

static void pair(int *a, int *b)
{
	int lfd = listener();
	pthread_t thread;
	struct sockaddr_in peer;
	socklen_t len = sizeof peer;
	*a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	TRUE(is_rsocket(*a));
	OK(pthread_create(&thread, NULL, dial, a));
	*b = accept4(lfd, (struct sockaddr *)&peer, &len, SOCK_CLOEXEC);
	TRUE(*b >= 0 && is_rsocket(*b));
	EQ(fcntl(*b, F_GETFD), FD_CLOEXEC);
	OK(pthread_join(thread, NULL));
	OK(close(lfd));
	TRUE(!is_rsocket(lfd));
}

static void data(void)
{
	int a, b, value;
	socklen_t len = sizeof value;
	char buf[64];
	pair(&a, &b);
	struct iovec v[2] = { { "ab", 2 }, { "cde", 3 } };
	EQ(write(a, "12", 2), 2);
	EQ(writev(a, v, 2), 5);
	EQ(send(a, "x", 1, MSG_NOSIGNAL), 1);
	EQ(sendto(a, "y", 1, 0, NULL, 0), 1);
	struct msghdr m = { .msg_iov = v, .msg_iovlen = 2 };
	EQ(sendmsg(a, &m, 0), 5);
	struct mmsghdr mm[2] = { { .msg_hdr = m }, { .msg_hdr = m } };
	EQ(sendmmsg(a, mm, 2, 0), 2);
	EQ(mm[1].msg_len, 5);
	EQ(recv(b, buf, 4, MSG_WAITALL | MSG_PEEK) > 0, 1);
	EQ(recv(b, buf, 23, MSG_WAITALL), 23);
	EQ(recv(b, buf + 23, 1, 0), 1);
	OK(memcmp(buf, "12abcdexyabcdeabcdeabcde", 24));
	MINUS_ONE(recv(b, buf, 1, MSG_DONTWAIT), EAGAIN);
	EQ(ioctl(b, FIONREAD, &value), 0);
	EQ(value, 0);
	EQ(send(a, "1234", 4, 0), 4);
	while (ioctl(b, FIONREAD, &value) == 0 && value < 4)
		;
	EQ(read(b, buf, 2), 2);
	struct iovec in[2] = { { buf, 1 }, { buf + 1, 1 } };
	EQ(readv(b, in, 2), 2);

	/* Both ways to say nonblocking, and both to ask. */
	int on = 1;
	OK(ioctl(b, FIONBIO, &on));
	TRUE(fcntl(b, F_GETFL) & O_NONBLOCK);
	MINUS_ONE(read(b, buf, 1), EAGAIN);
	OK(fcntl(b, F_SETFL, fcntl(b, F_GETFL) & ~O_NONBLOCK));

	/* Options of the rsocket, and of TCP alone. */
	OK(setsockopt(a, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
	OK(getsockopt(a, IPPROTO_TCP, TCP_NODELAY, &value, &len));
	EQ(value, 1);
	OK(setsockopt(a, SOL_SOCKET, SO_PRIORITY, &on, sizeof on));
	OK(getsockopt(a, SOL_SOCKET, SO_PRIORITY, &value, &len));
	EQ(value, 1);

	/* A file. */
	FILE *file = tmpfile();
	for (int i = 0; i < 50000; i++)
		fputc(i % 251, file);
	fflush(file);
	off_t at = 100;
	EQ(sendfile(a, fileno(file), &at, 49900), 49900);
	EQ(at, 50000);
	unsigned char *got = malloc(49900);
	EQ(recv(b, got, 49900, MSG_WAITALL), 49900);
	for (int i = 0; i < 49900; i++)
		EQ(got[i], (i + 100) % 251);
	free(got);
	fclose(file);

	/* A duplicate keeps the connection. */
	int c = dup(a);
	TRUE(c >= 0 && is_rsocket(c));
	OK(close(a));
	EQ(write(c, "d", 1), 1);
	EQ(read(b, buf, 1), 1);
	EQ(dup2(c, a), a);
	OK(close(c));
	EQ(write(a, "e", 1), 1);
	EQ(read(b, buf, 1), 1);
	c = fcntl(a, F_DUPFD_CLOEXEC, 100);
	TRUE(c >= 100 && is_rsocket(c));
	OK(close(c));

	OK(shutdown(a, SHUT_WR));
	EQ(read(b, buf, 1), 0);
	EQ(write(b, "f", 1), 1);
	EQ(read(a, buf, 1), 1);
	OK(close(a));
	OK(close(b));
}

static void waiting(void)
{
	int a, b, p[2];
	char c;
	pair(&a, &b);
	OK(pipe(p));
	struct pollfd fds[2] = { { .fd = b, .events = POLLIN }, { .fd = p[0], .events = POLLIN } };
	struct timespec ms = { .tv_nsec = 1000000 };
	EQ(poll(fds, 2, 1), 0);
	EQ(ppoll(fds, 2, &ms, NULL), 0);
	EQ(write(a, "1", 1), 1);
	EQ(poll(fds, 2, -1), 1);
	EQ(fds[0].revents, POLLIN);
	EQ(write(p[1], "2", 1), 1);
	EQ(ppoll(fds, 2, NULL, NULL), 2);
	fd_set r, w;
	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_SET(b, &r);
	FD_SET(p[0], &r);
	FD_SET(a, &w);
	struct timeval second = { .tv_sec = 1 };
	EQ(select(FD_SETSIZE, &r, &w, NULL, &second), 3);
	EQ(pselect(FD_SETSIZE, &r, NULL, NULL, NULL, NULL), 2);
	EQ(read(b, &c, 1), 1);
	struct timeval none = { 0 };
	EQ(select(FD_SETSIZE, &r, NULL, NULL, &none), 1);
	TRUE(!FD_ISSET(b, &r) && FD_ISSET(p[0], &r));

	int ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = 1 }, found[4];
	OK(epoll_ctl(ep, EPOLL_CTL_ADD, p[0], &e));
	e.data.u64 = 2;
	OK(epoll_ctl(ep, EPOLL_CTL_ADD, b, &e));
	MINUS_ONE(epoll_ctl(ep, EPOLL_CTL_ADD, b, &e), EEXIST);
	EQ(epoll_wait(ep, found, 4, -1), 1);
	EQ(found[0].data.u64, 1);
	EQ(write(a, "3", 1), 1);
	while (epoll_wait(ep, found, 4, -1) < 2)
		;
	EQ(found[0].data.u64 + found[1].data.u64, 3);
	EQ(read(p[0], &c, 1), 1);
	EQ(epoll_pwait(ep, found, 4, -1, NULL), 1);
	EQ(found[0].data.u64, 2);
	OK(epoll_ctl(ep, EPOLL_CTL_DEL, b, NULL));
	EQ(epoll_wait(ep, found, 4, 1), 0);
	OK(close(ep));
	OK(close(a));
	OK(close(b));
	OK(close(p[0]));
	OK(close(p[1]));
}

static void *wait_for_one(void *arg)
{
	struct epoll_event found;
	EQ(epoll_wait(*(int *)arg, &found, 1, -1), 1);
	EQ(found.data.u64, 3);
	return NULL;
}

/* Threads wait for a set before it has its first rsocket. */
static void first(void)
{
	int a, b, ep = epoll_create1(0);
	char c;
	pthread_t threads[3], cancelled;
	struct timespec limit, begin, end;
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = 3 }, found;
	OK(pthread_create(&cancelled, NULL, wait_for_one, &ep));
	for (int i = 0; i < 3; i++)
		OK(pthread_create(&threads[i], NULL, wait_for_one, &ep));
	usleep(50000);
	pair(&a, &b);
	OK(pthread_cancel(cancelled));
	OK(pthread_join(cancelled, NULL));
	OK(epoll_ctl(ep, EPOLL_CTL_ADD, b, &e));
	usleep(50000);
	EQ(write(a, "1", 1), 1);
	OK(clock_gettime(CLOCK_REALTIME, &limit));
	limit.tv_sec += 20;
	for (int i = 0; i < 3; i++)
		OK(pthread_timedjoin_np(threads[i], NULL, &limit));
	EQ(read(b, &c, 1), 1);
	/* What woke them is gone, and keeps nobody awake. */
	OK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin));
	EQ(epoll_wait(ep, &found, 1, 500), 0);
	OK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end));
	TRUE((end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec < 100000000L);
	OK(close(ep));
	OK(close(a));
	OK(close(b));
}

static volatile int pipes;

static void on_pipe(int signal)
{
	(void)signal;
	pipes++;
}

static void broken(void)
{
	int a, b;
	char c;
	pair(&a, &b);
	signal(SIGPIPE, on_pipe);
	OK(close(b));
	EQ(read(a, &c, 1), 0);
	MINUS_ONE(write(a, "x", 1), ECONNRESET);
	EQ(pipes, 0);
	MINUS_ONE(send(a, "x", 1, MSG_NOSIGNAL), EPIPE);
	EQ(pipes, 0);
	MINUS_ONE(write(a, "x", 1), EPIPE);
	EQ(pipes, 1);
	OK(close(a));
	signal(SIGPIPE, SIG_DFL);
}

/* A child has the descriptors, but the connection stays the parent's. */
static void children(void)
{
	int a, b, status;
	char c;
	pair(&a, &b);
	pid_t child = fork();
	if (child == 0) {
		_exit(is_rsocket(a) || close(a) != 0 || close(b) != 0);
	}
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
	/* It makes its own, and its threads wait before it has the first one. */
	child = fork();
	if (child == 0) {
		first();
		_exit(0);
	}
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
	child = vfork();
	if (child == 0) {
		close(a);
		_exit(0);
	}
	EQ(waitpid(child, &status, 0), child);
	EQ(system("exec true"), 0);
	EQ(write(a, "x", 1), 1);
	EQ(read(b, &c, 1), 1);
	OK(close(a));
	OK(close(b));
}

/* What speaks TCP alone: this program without the object. Tells its address, and answers three clients. */
static int serve(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in any = { .sin_family = AF_INET };
	socklen_t len = sizeof any;
	/* Does not stay behind when the test fails. */
	alarm(50);
	inet_pton(AF_INET, "127.0.0.1", &any.sin_addr);
	if (fd < 0 || is_rsocket(fd) || bind(fd, (struct sockaddr *)&any, sizeof any) || listen(fd, 4) ||
	    getsockname(fd, (struct sockaddr *)&any, &len) || write(1, &any, sizeof any) != sizeof any)
		return 1;
	for (int i = 0; i < 3; i++) {
		char c = 0;
		int conn = accept(fd, NULL, NULL);
		if (conn < 0 || read(conn, &c, 1) != 1 || write(conn, &c, 1) != 1)
			return 2;
		close(conn);
	}
	return 0;
}

/* Where nobody speaks RDMA a client becomes TCP's. */
static void fallback(const char *self)
{
	int ready[2], status;
	OK(pipe(ready));
	pid_t child = fork();
	if (child == 0) {
		unsetenv("LD_PRELOAD");
		dup2(ready[1], 1);
		execl(self, self, "serve", NULL);
		_exit(9);
	}
	EQ(read(ready[0], &target, sizeof target), sizeof target);
	for (int way = 0; way < 3; way++) {
		int flags = way > 0 ? SOCK_NONBLOCK : 0;
		int fd = socket(AF_INET, SOCK_STREAM | flags, 0), value;
		socklen_t len = sizeof value;
		TRUE(is_rsocket(fd));
		int result = connect(fd, (struct sockaddr *)&target, sizeof target);
		if (way == 0) {
			OK(result);
		} else {
			TRUE(result == 0 || errno == EINPROGRESS);
			if (way == 1) {
				struct pollfd p = { .fd = fd, .events = POLLOUT };
				EQ(poll(&p, 1, 10000), 1);
				EQ(p.revents, POLLOUT);
			} else {
				int ep = epoll_create1(0);
				struct epoll_event e = { .events = EPOLLOUT, .data.u64 = 42 }, found;
				OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
				EQ(epoll_wait(ep, &found, 1, 10000), 1);
				EQ(found.data.u64, 42);
				EQ(found.events, EPOLLOUT);
				OK(close(ep));
			}
			OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &len));
			EQ(value, 0);
			OK(fcntl(fd, F_SETFL, 0));
		}
		TRUE(!is_rsocket(fd));
		char c = 'q';
		EQ(write(fd, &c, 1), 1);
		EQ(read(fd, &c, 1), 1);
		EQ(c, 'q');
		OK(close(fd));
	}
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		return serve();
	int udp = socket(AF_INET, SOCK_DGRAM, 0);
	TRUE(udp >= 0 && !is_rsocket(udp));
	OK(close(udp));
	fallback(argv[0]);
	data();
	waiting();
	first();
	broken();
	children();
	return 0;
}
