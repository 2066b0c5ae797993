/* rsockets from C: every call of rsocket.h on a connected pair, and the mistakes of their callers. */
#include "check.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <sys/epoll.h>
#include <unistd.h>

static struct sockaddr_in loopback(int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
	return a;
}

static struct sockaddr *sa(struct sockaddr_in *a)
{
	return (struct sockaddr *)a;
}

static int listener(struct sockaddr_in *name)
{
	struct sockaddr_in any = loopback(0);
	socklen_t len = sizeof *name;
	int fd = rsocket(AF_INET, SOCK_STREAM, 0);
	TRUE(fd >= 0);
	OK(rbind(fd, sa(&any), sizeof any));
	OK(rlisten(fd, 4));
	OK(rgetsockname(fd, sa(name), &len));
	EQ(len, sizeof *name);
	TRUE(name->sin_port != 0);
	return fd;
}

static struct sockaddr_in target;

static void *dial(void *arg)
{
	OK(rconnect(*(int *)arg, sa(&target), sizeof target));
	return NULL;
}

/* A connected pair; both sides take an I/O map. */
static void pair(int *a, int *b)
{
	int one = 1, lfd = listener(&target);
	struct sockaddr_in peer;
	socklen_t len = sizeof peer;
	pthread_t thread;

	OK(rsetsockopt(lfd, SOL_RDMA, RDMA_IOMAPSIZE, &one, sizeof one));
	*a = rsocket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
	TRUE(*a >= 0);
	OK(rsetsockopt(*a, SOL_RDMA, RDMA_IOMAPSIZE, &one, sizeof one));
	OK(pthread_create(&thread, NULL, dial, a));
	*b = raccept(lfd, sa(&peer), &len);
	TRUE(*b >= 0);
	EQ(peer.sin_family, AF_INET);
	OK(pthread_join(thread, NULL));
	OK(rclose(lfd));
}

/* Every call on a descriptor that is no rsocket. */
static void refuse(int fd)
{
	struct sockaddr_in a = loopback(1);
	socklen_t len = sizeof a;
	char c = 0;
	struct iovec v = { &c, 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };
	int value = 1;

	MINUS_ONE(rbind(fd, sa(&a), sizeof a), EBADF);
	MINUS_ONE(rlisten(fd, 1), EBADF);
	MINUS_ONE(raccept(fd, NULL, NULL), EBADF);
	MINUS_ONE(rconnect(fd, sa(&a), sizeof a), EBADF);
	MINUS_ONE(rshutdown(fd, SHUT_WR), EBADF);
	MINUS_ONE(rclose(fd), EBADF);
	MINUS_ONE(rrecv(fd, &c, 1, 0), EBADF);
	MINUS_ONE(rrecvfrom(fd, &c, 1, 0, sa(&a), &len), EBADF);
	MINUS_ONE(rrecvmsg(fd, &m, 0), EBADF);
	MINUS_ONE(rread(fd, &c, 1), EBADF);
	MINUS_ONE(rreadv(fd, &v, 1), EBADF);
	MINUS_ONE(rsend(fd, &c, 1, 0), EBADF);
	MINUS_ONE(rsendto(fd, &c, 1, 0, sa(&a), sizeof a), EBADF);
	MINUS_ONE(rsendmsg(fd, &m, 0), EBADF);
	MINUS_ONE(rwrite(fd, &c, 1), EBADF);
	MINUS_ONE(rwritev(fd, &v, 1), EBADF);
	MINUS_ONE(rgetpeername(fd, sa(&a), &len), EBADF);
	MINUS_ONE(rgetsockname(fd, sa(&a), &len), EBADF);
	MINUS_ONE(rsetsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &value, sizeof value), EBADF);
	MINUS_ONE(rgetsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &value, &len), EBADF);
	MINUS_ONE(rfcntl(fd, F_GETFL), EBADF);
	MINUS_ONE(riomap(fd, &c, 1, PROT_WRITE, 0, -1), EBADF);
	MINUS_ONE(riounmap(fd, &c, 1), EBADF);
	MINUS_ONE(riowrite(fd, &c, 1, 0, 0), EBADF);
}

static void arguments(void)
{
	struct sockaddr_in a = loopback(0), b = loopback(0);
	struct sockaddr_storage unix_ = { .ss_family = AF_UNIX };
	socklen_t len;
	char c = 0;
	int value = 1;

	MINUS_ONE(rsocket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
	MINUS_ONE(rsocket(-1, SOCK_STREAM, 0), EAFNOSUPPORT);
	MINUS_ONE(rsocket(AF_INET, SOCK_RAW, 0), EPROTONOSUPPORT);
	MINUS_ONE(rsocket(AF_INET, SOCK_STREAM, IPPROTO_UDP), EPROTONOSUPPORT);

	int fd = rsocket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	TRUE(fd >= 0);
	EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
	EQ(rfcntl(fd, F_GETFL), O_RDWR);
	MINUS_ONE(rfcntl(fd, F_DUPFD, 0), EOPNOTSUPP);
	MINUS_ONE(rbind(fd, NULL, sizeof a), EINVAL);
	MINUS_ONE(rbind(fd, sa(&a), 3), EINVAL);
	MINUS_ONE(rbind(fd, (struct sockaddr *)&unix_, sizeof unix_), EINVAL);
	MINUS_ONE(rconnect(fd, NULL, 0), EINVAL);
	MINUS_ONE(raccept(fd, NULL, NULL), EINVAL);
	MINUS_ONE(rshutdown(fd, SHUT_WR), ENOTCONN);
	MINUS_ONE(rshutdown(fd, 7), EINVAL);
	MINUS_ONE(rsend(fd, &c, 1, 0), ENOTCONN);
	MINUS_ONE(rrecv(fd, &c, 1, 0), ENOTCONN);
	MINUS_ONE(riomap(fd, &c, 1, PROT_WRITE, 0, -1), ENOTCONN);
	MINUS_ONE(riomap(fd, &c, 1, PROT_EXEC, 0, -1), EINVAL);
	MINUS_ONE(rgetpeername(fd, sa(&a), &len), ENOTCONN);
	MINUS_ONE(rgetsockname(fd, sa(&a), NULL), EFAULT);
	MINUS_ONE(rsetsockopt(fd, SOL_SOCKET, SO_REUSEADDR, NULL, 4), EFAULT);
	MINUS_ONE(rsetsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &value, 1), EINVAL);
	MINUS_ONE(rsetsockopt(fd, SOL_SOCKET, 12345, &value, sizeof value), ENOPROTOOPT);
	len = sizeof value;
	MINUS_ONE(rgetsockopt(fd, 4711, 1, &value, &len), ENOPROTOOPT);
	MINUS_ONE(rgetsockopt(fd, SOL_SOCKET, SO_ERROR, NULL, &len), EFAULT);
	MINUS_ONE(rgetsockopt(fd, SOL_RDMA, RDMA_ROUTE, &value, &len), EINVAL);
	/* A name that is cut says how long it would be. */
	OK(rbind(fd, sa(&b), sizeof b));
	memset(&a, 0, sizeof a);
	len = 4;
	OK(rgetsockname(fd, sa(&a), &len));
	EQ(len, sizeof a);
	EQ(a.sin_family, AF_INET);
	EQ(a.sin_addr.s_addr, 0);
	TRUE(a.sin_port != 0);
	MINUS_ONE(rbind(fd, sa(&b), sizeof b), EINVAL);
	OK(rclose(fd));
	refuse(fd);

	/* Nobody there. */
	int gone = listener(&target);
	OK(rclose(gone));
	fd = rsocket(AF_INET, SOCK_STREAM, 0);
	MINUS_ONE(rconnect(fd, sa(&target), sizeof target), ECONNREFUSED);
	OK(rclose(fd));

	struct pollfd none = { .fd = -1, .events = POLLIN };
	EQ(rpoll(&none, 1, 0), 0);
	EQ(rpoll(NULL, 0, 0), 0);
	MINUS_ONE(rpoll(NULL, 1, 0), EFAULT);
	struct pollfd bad = { .fd = 999, .events = POLLIN };
	EQ(rpoll(&bad, 1, -1), 1);
	EQ(bad.revents, POLLNVAL);
	MINUS_ONE(rselect(-1, NULL, NULL, NULL, NULL), EINVAL);
	struct timeval wrong = { .tv_sec = -1 };
	MINUS_ONE(rselect(0, NULL, NULL, NULL, &wrong), EINVAL);
}

static void data(void)
{
	int a, b, value, pipes[2];
	socklen_t len;
	char buf[64] = "", rest[64] = "";

	pair(&a, &b);
	MINUS_ONE(rrecv(a, buf, 1, MSG_DONTWAIT), EAGAIN);
	OK(rfcntl(a, F_SETFL, O_NONBLOCK));
	EQ(rfcntl(a, F_GETFL), O_RDWR | O_NONBLOCK);
	MINUS_ONE(rread(a, buf, 1), EAGAIN);
	OK(rfcntl(a, F_SETFL, 0));

	struct iovec out[2] = { { "abc", 3 }, { "defg", 4 } };
	EQ(rwritev(b, out, 2), 7);
	EQ(rwrite(b, "hi", 2), 2);
	struct msghdr msg = { .msg_iov = out, .msg_iovlen = 2 };
	EQ(rsendmsg(b, &msg, 0), 7);
	EQ(rsendto(b, "!", 1, 0, NULL, 0), 1);
	MINUS_ONE(rwritev(b, out, -1), EINVAL);
	MINUS_ONE(rwritev(b, NULL, 1), EFAULT);
	MINUS_ONE(rwritev(b, out, 1025), EMSGSIZE);
	MINUS_ONE(rsendmsg(b, NULL, 0), EFAULT);
	MINUS_ONE(rrecvmsg(a, NULL, 0), EFAULT);
	MINUS_ONE(rsend(b, (void *)8, 1, 0), EFAULT);
	MINUS_ONE(rsend(b, (void *)8, 4000, 0), EFAULT);
	EQ(rrecv(a, buf, 17, MSG_WAITALL | MSG_PEEK) > 0, 1);
	MINUS_ONE(rrecv(a, (void *)8, 4, 0), EFAULT);
	struct iovec in[2] = { { buf, 5 }, { rest, 12 } };
	struct msghdr got = { .msg_iov = in, .msg_iovlen = 2, .msg_control = buf + 32, .msg_controllen = 8 };
	EQ(rrecvmsg(a, &got, MSG_WAITALL), 17);
	EQ(got.msg_controllen, 0);
	OK(memcmp(buf, "abcde", 5));
	OK(memcmp(rest, "fghiabcdefg!", 12));

	struct sockaddr_in peer, name;
	len = sizeof peer;
	OK(rgetpeername(a, sa(&peer), &len));
	EQ(peer.sin_port, target.sin_port);
	len = sizeof name;
	OK(rgetsockname(b, sa(&name), &len));
	EQ(name.sin_port, target.sin_port);
	EQ(rsend(b, "x", 1, MSG_NOSIGNAL), 1);
	len = sizeof peer;
	EQ(rrecvfrom(a, buf, 1, 0, sa(&peer), &len), 1);
	EQ(peer.sin_port, target.sin_port);

	len = sizeof value;
	OK(rgetsockopt(a, IPPROTO_TCP, TCP_MAXSEG, &value, &len));
	TRUE(value >= 256);
	OK(rgetsockopt(a, SOL_SOCKET, SO_ERROR, &value, &len));
	EQ(value, 0);
	value = 100;
	MINUS_ONE(rsetsockopt(a, SOL_RDMA, RDMA_SQSIZE, &value, sizeof value), EINVAL);

	/* Descriptors of both kinds. */
	OK(pipe(pipes));
	struct pollfd fds[2] = { { .fd = a, .events = POLLIN }, { .fd = pipes[0], .events = POLLIN } };
	EQ(rpoll(fds, 2, 1), 0);
	EQ(write(pipes[1], "p", 1), 1);
	EQ(rsend(b, "s", 1, 0), 1);
	while (rpoll(fds, 2, -1) < 2)
		;
	EQ(fds[0].revents, POLLIN);
	EQ(fds[1].revents, POLLIN);
	fd_set read_, write_;
	FD_ZERO(&read_);
	FD_ZERO(&write_);
	FD_SET(a, &read_);
	FD_SET(b, &read_);
	FD_SET(pipes[0], &read_);
	FD_SET(a, &write_);
	struct timeval second = { .tv_sec = 1 };
	EQ(rselect(FD_SETSIZE, &read_, &write_, NULL, &second), 3);
	TRUE(FD_ISSET(a, &read_) && !FD_ISSET(b, &read_) && FD_ISSET(pipes[0], &read_) && FD_ISSET(a, &write_));
	TRUE(second.tv_sec < 1);

	/* rdma-core 65's, which the headers of 44 do not have. */
	int (*create)(int) = dlsym(RTLD_DEFAULT, "repoll_create");
	int (*ctl)(int, int, int, struct epoll_event *) = dlsym(RTLD_DEFAULT, "repoll_ctl");
	int (*wait)(int, struct epoll_event *, int, int) = dlsym(RTLD_DEFAULT, "repoll_wait");
	TRUE(create && ctl && wait);
	MINUS_ONE(create(0), EINVAL);
	int set = create(1);
	TRUE(set >= 0);
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 77 }, found[4];
	OK(ctl(set, EPOLL_CTL_ADD, a, &event));
	MINUS_ONE(ctl(set, EPOLL_CTL_ADD, a, &event), EEXIST);
	MINUS_ONE(ctl(set, EPOLL_CTL_ADD, b, NULL), EFAULT);
	MINUS_ONE(ctl(set, EPOLL_CTL_MOD, b, &event), ENOENT);
	MINUS_ONE(ctl(set, 99, b, &event), EINVAL);
	MINUS_ONE(ctl(a, EPOLL_CTL_ADD, b, &event), EBADF);
	MINUS_ONE(ctl(set, EPOLL_CTL_ADD, 999, &event), EBADF);
	MINUS_ONE(wait(set, found, 0, 0), EINVAL);
	MINUS_ONE(wait(set, NULL, 1, 0), EFAULT);
	EQ(wait(set, found, 4, -1), 1);
	EQ(found[0].data.u64, 77);
	EQ(found[0].events, EPOLLIN);
	MINUS_ONE(rsend(set, "x", 1, 0), EBADF);
	OK(rclose(set));
	MINUS_ONE(wait(set, found, 1, 0), EBADF);

	/* The end, from one side and then from the other. */
	OK(rshutdown(b, SHUT_WR));
	MINUS_ONE(rsend(b, "x", 1, 0), EPIPE);
	EQ(rrecv(a, buf, sizeof buf, MSG_WAITALL), 1);
	EQ(rrecv(a, buf, sizeof buf, 0), 0);
	EQ(rsend(a, "y", 1, 0), 1);
	EQ(rrecv(b, buf, 1, 0), 1);
	OK(rclose(a));
	EQ(rrecv(b, buf, 1, 0), 0);
	OK(rclose(b));
	MINUS_ONE(rclose(b), EBADF);
}

static void maps(void)
{
	int a, b;
	static char memory[10000];
	char c;

	pair(&a, &b);
	EQ(riowrite(a, memory, 10, 0, 0), 0);
	EQ(riomap(b, memory, sizeof memory, PROT_WRITE, 0, 4096), 4096);
	MINUS_ONE(riomap(b, memory, sizeof memory, PROT_WRITE, 0, -1), ENOMEM);
	EQ(riomap(b, memory, 100, PROT_NONE, 0, -1), (off_t)(uintptr_t)memory);
	MINUS_ONE(riomap(b, (void *)8, 100, PROT_NONE, 0, -1), EFAULT);
	EQ(rsend(b, "m", 1, 0), 1);
	EQ(rrecv(a, &c, 1, 0), 1);
	char *text = malloc(8000);
	memset(text, 'z', 8000);
	EQ(riowrite(a, text, 8000, 4096 + 1000, 0), 8000);
	EQ(riowrite(a, text, 8000, 4096 + 9000, 0), 1000);
	MINUS_ONE(riowrite(a, text, 1, -1, 0), EINVAL);
	MINUS_ONE(riowrite(a, (void *)8, 100, 4096, 0), EFAULT);
	EQ(rsend(a, "w", 1, 0), 1);
	EQ(rrecv(b, &c, 1, 0), 1);
	EQ(memory[999], 0);
	for (int i = 1000; i < 10000; i++)
		EQ(memory[i], 'z');
	MINUS_ONE(riounmap(b, memory, 5), EINVAL);
	OK(riounmap(b, memory, sizeof memory));
	OK(riounmap(b, memory, 100));
	free(text);
	OK(rclose(a));
	OK(rclose(b));
}

static void datagrams(void)
{
	struct sockaddr_in an = loopback(0), bn = loopback(0), from;
	socklen_t len = sizeof an;
	char buf[4096];

	int a = rsocket(AF_INET, SOCK_DGRAM, 0), b = rsocket(AF_INET, SOCK_DGRAM, IPPROTO_UDP);
	TRUE(a >= 0 && b >= 0);
	OK(rbind(a, sa(&an), sizeof an));
	OK(rbind(b, sa(&bn), sizeof bn));
	OK(rgetsockname(a, sa(&an), &len));
	OK(rgetsockname(b, sa(&bn), &len));
	MINUS_ONE(rsend(a, "x", 1, 0), EDESTADDRREQ);
	MINUS_ONE(rlisten(a, 1), EOPNOTSUPP);
	MINUS_ONE(raccept(a, NULL, NULL), EOPNOTSUPP);
	MINUS_ONE(riomap(a, buf, 1, PROT_NONE, 0, -1), EOPNOTSUPP);
	MINUS_ONE(rrecv(a, buf, 1, MSG_DONTWAIT), EAGAIN);
	for (int i = 0; i < 20; i++) {
		EQ(rsendto(a, "hello", 5, 0, sa(&bn), sizeof bn), 5);
		len = sizeof from;
		EQ(rrecvfrom(b, buf, 3, MSG_TRUNC, sa(&from), &len), 5);
		EQ(from.sin_port, an.sin_port);
		EQ(rsendto(b, "", 0, 0, sa(&from), sizeof from), 0);
		EQ(rrecv(a, buf, 3, 0), 0);
	}
	/* One that is not bound has the same port in each datagram. */
	int unbound = rsocket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in first = {0};
	for (int i = 0; i < 5; i++) {
		EQ(rsendto(unbound, "hello", 5, 0, sa(&bn), sizeof bn), 5);
		len = sizeof from;
		EQ(rrecvfrom(b, buf, 5, 0, sa(&from), &len), 5);
		if (i == 0)
			first = from;
		TRUE(from.sin_port != 0 && from.sin_port == first.sin_port);
		EQ(rsendto(b, "back", 4, 0, sa(&from), sizeof from), 4);
		EQ(rrecv(unbound, buf, 5, 0), 4);
	}
	len = sizeof an;
	struct sockaddr_in own;
	OK(rgetsockname(unbound, sa(&own), &len));
	EQ(own.sin_port, first.sin_port);
	OK(rclose(unbound));
	MINUS_ONE(rsendto(a, buf, sizeof buf, 0, sa(&bn), sizeof bn), EMSGSIZE);
	MINUS_ONE(rsendto(a, buf, 1, 0, sa(&bn), 2), EINVAL);
	OK(rconnect(a, sa(&bn), sizeof bn));
	EQ(rwrite(a, "c", 1), 1);
	struct iovec v = { buf, sizeof buf };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_name = &from, .msg_namelen = sizeof from };
	EQ(rrecvmsg(b, &m, 0), 1);
	EQ(m.msg_namelen, sizeof from);
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	OK(rconnect(a, &none, sizeof none));
	MINUS_ONE(rsend(a, "x", 1, 0), EDESTADDRREQ);
	OK(rclose(a));
	OK(rclose(b));
}

int main(void)
{
	/* A wrong call must not end the test by a signal: EPIPE comes without one. */
	refuse(-1);
	refuse(0);
	refuse(1 << 30);
	arguments();
	data();
	maps();
	datagrams();
	return 0;
}
