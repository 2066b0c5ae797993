/*
 * Two of these do to each other what verbs can do, and check every byte: SEND, WRITE (read back), READ and atomics on
 * reliable connections (`-t rc`, `-t xrc`), SEND and WRITE with immediate data on unreliable ones (`-t uc`), datagrams
 * (`-t ud`). Set-up goes over TCP.
 *
 *   exchange -p PORT [options]           waits for the other
 *   exchange -p PORT [options] HOST
 *
 *   -o OPS      of a reliable connection: letters of s (SEND), w (WRITE), r (READ), a (atomics); all of them
 *   -q QPS      queue pairs (4)             -n COUNT    operations of each (2000)
 *   -D DEPTH    outstanding of each (4)     -s SIZE     of the longest message (20000; ud: the MTU less 100)
 *   -T CODE     ACK timeout (14)            -r COUNT    retries (7)
 *   -m MTU      path MTU (1024)             -g INDEX    of the GID (0)
 *   -S SEED     (1)                         -R          receives from a shared queue
 *   -e          sleeps for completions      -b          says every 100 ms how far it is, and goes on until it is ended
 *   -w          unreliable: every message must arrive
 *
 * Ends with 0 if everything was right; 3 if each queue pair ended as it must when its peer cannot be reached: with
 * IBV_WC_RETRY_EXC_ERR, then flushes, within 4 x 4.096 us x 2^timeout x (retries + 1) + 1 s of the last sign of life, not
 * counted what its threads waited for a processor meanwhile; 6 if the other ended during the set-up or when all was done.
 * Anything else is wrong.
 */
#include "exchange.h"

struct options opt = { .ops = "swra", .qps = 4, .count = 2000, .depth = 4, .size = 20000, .timeout = 14, .retries = 7,
		       .mtu = 1024, .seed = 1, .type = "rc" };

void die(int status, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vprintf(format, list);
	va_end(list);
	printf("\n");
	fflush(stdout);
	_exit(status);
}

double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

uint64_t mix(uint64_t z)
{
	z += 0x9e3779b97f4a7c15;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

void pattern(char *to, size_t len, uint64_t key)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t word = mix(key + i);
		memcpy(to + i, &word, len - i < 8 ? len - i : 8);
	}
}

static void all(int fd, void *data, size_t len, int write_it)
{
	for (size_t done = 0; done < len;) {
		char *at = (char *)data + done;
		ssize_t n = write_it ? send(fd, at, len - done, MSG_NOSIGNAL) : recv(fd, at, len - done, 0);
		if (n <= 0 && !(n < 0 && errno == EINTR))
			die(PEER_GONE, "the other side is gone");
		if (n > 0)
			done += n;
	}
}

void swap_over_tcp(int fd, void *mine, void *theirs, size_t len)
{
	all(fd, mine, len, 1);
	all(fd, theirs, len, 0);
}

static int dial(const char *host)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE, .ai_family = host ? 0 : AF_INET6 };
	struct addrinfo *list;
	char port[8];
	snprintf(port, sizeof port, "%d", opt.port);
	if (getaddrinfo(host, port, &hints, &list))
		die(WRONG, "no such address: %s", host ? host : "any");
	int fd = socket(list->ai_family, SOCK_STREAM, 0), one = 1;
	if (host) {
		if (connect(fd, list->ai_addr, list->ai_addrlen))
			die(PEER_GONE, "cannot connect: %s", strerror(errno));
	} else {
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		if (bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, 1))
			die(WRONG, "cannot listen: %s", strerror(errno));
		int listener = fd;
		fd = accept(listener, NULL, NULL);
		close(listener);
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	freeaddrinfo(list);
	return fd;
}

static void parse(int argc, char **argv)
{
	int c;
	while ((c = getopt(argc, argv, "p:t:o:q:n:D:s:T:r:m:g:S:Rebw")) != -1) {
		long number = optarg ? strtol(optarg, NULL, 10) : 0;
		switch (c) {
		case 'p': opt.port = number; break;
		case 't': opt.type = optarg; break;
		case 'o': opt.ops = optarg; break;
		case 'q': opt.qps = number; break;
		case 'n': opt.count = number; break;
		case 'D': opt.depth = number; break;
		case 's': opt.size = number; break;
		case 'T': opt.timeout = number; break;
		case 'r': opt.retries = number; break;
		case 'm': opt.mtu = number; break;
		case 'g': opt.gid = number; break;
		case 'S': opt.seed = number; break;
		case 'R': opt.srq = 1; break;
		case 'e': opt.events = 1; break;
		case 'b': opt.endless = 1; break;
		case 'w': opt.whole = 1; break;
		default: die(WRONG, "see the source for the options");
		}
	}
	opt.host = argv[optind];
	if (opt.qps < 1 || opt.qps > MAX_QPS || opt.depth < 1 || opt.depth > MAX_DEPTH || opt.size < 64 || opt.size > SOURCE)
		die(WRONG, "out of range");
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	parse(argc, argv);
	int fd = dial(opt.host);
	int unreliable = opt.type[0] == 'u';
	struct side side;
	open_side(&side, fd);
	if (unreliable)
		exchange_unreliable(&side);
	else
		exchange_reliable(&side);
	return 0;
}
