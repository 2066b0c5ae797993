/* Calls libc in every way that the view answers, and prints the names of those that went wrong. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define CLASS "/sys/class/infiniband"
#define FILE_ CLASS "/anyverbs0/node_type"
#define NODE "/dev/infiniband/uverbs0"

static int wrong;

#define EXPECT(condition)                                                     \
	do {                                                                  \
		if (!(condition)) {                                           \
			printf("line %d: %s (%s)\n", __LINE__, #condition,    \
			       strerror(errno));                              \
			wrong = 1;                                            \
		}                                                             \
	} while (0)

static int holds(int fd)
{
	char text[16] = "";
	ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	if (fd >= 0)
		close(fd);
	return got == 6 && !strcmp(text, "1: CA\n");
}

static int stream_holds(FILE *stream)
{
	char text[16] = "";
	int right = stream && fgets(text, sizeof text, stream) && !strcmp(text, "1: CA\n");
	if (stream)
		fclose(stream);
	return right;
}

static void *many_opens(void *unused)
{
	for (int i = 0; i < 2000; i++) {
		int fd = open(FILE_, O_RDONLY);
		int other = open("/dev/null", O_RDONLY);
		if (!holds(fd) || other < 0)
			wrong = 1;
		close(other);
	}
	return unused;
}

static void *open_fifo(void *path)
{
	return (void *)(long)open(path, O_RDONLY);
}

int main(void)
{
	char path[PATH_MAX], *allocated;
	struct stat st;
	struct stat64 st64;
	struct statx stx;
	struct statfs fs;

	EXPECT(holds(open(FILE_, O_RDONLY)));
	EXPECT(holds(open64(FILE_, O_RDONLY)));
	EXPECT(holds(openat(AT_FDCWD, FILE_, O_RDONLY)));
	int dir = open(CLASS "/anyverbs0", O_RDONLY | O_DIRECTORY);
	EXPECT(holds(openat(dir, "node_type", O_RDONLY)));
	EXPECT(holds(openat64(dir, FILE_, O_RDONLY)));
	int root = open("/", O_RDONLY | O_DIRECTORY);
	EXPECT(holds(openat(root, "sys/class/infiniband/anyverbs0/node_type", O_RDONLY)));
	EXPECT(openat(dir, "sys/class/infiniband", O_RDONLY) == -1 && errno == ENOENT);
	EXPECT(stream_holds(fopen(FILE_, "r")));
	EXPECT(stream_holds(fopen64(FILE_, "re")));
	EXPECT(stream_holds(freopen(FILE_, "r", fopen("/dev/null", "r"))));
	EXPECT(open(CLASS "/absent", O_RDONLY) == -1 && errno == ENOENT);
	int node = open(NODE, O_RDWR | O_CLOEXEC);
	EXPECT(node >= 0 && write(node, "x", 1) == 1 && fcntl(node, F_GETFD) == FD_CLOEXEC);

	EXPECT(stat(FILE_, &st) == 0 && S_ISREG(st.st_mode));
	EXPECT(stat64(FILE_, &st64) == 0 && S_ISREG(st64.st_mode));
	EXPECT(lstat(CLASS "/anyverbs0", &st) == 0 && S_ISLNK(st.st_mode));
	EXPECT(stat(CLASS "/anyverbs0", &st) == 0 && S_ISDIR(st.st_mode));
	EXPECT(lstat(NODE, &st) == 0 && S_ISCHR(st.st_mode));
	EXPECT(lstat64(NODE, &st64) == 0 && S_ISCHR(st64.st_mode));
	EXPECT(fstatat(dir, NODE, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(st.st_mode));
	EXPECT(statx(AT_FDCWD, NODE, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &stx) == 0 && S_ISCHR(stx.stx_mode));
	EXPECT(statx(dir, "node_type", 0, STATX_TYPE, &stx) == 0 && S_ISREG(stx.stx_mode));
	EXPECT(statfs(CLASS, &fs) == 0);
	EXPECT(access(NODE, R_OK | W_OK) == 0 && eaccess(NODE, R_OK | W_OK) == 0);
	EXPECT(faccessat(AT_FDCWD, FILE_, R_OK, 0) == 0);
	EXPECT(access(CLASS "/absent", F_OK) == -1 && errno == ENOENT);
	EXPECT(getxattr(FILE_, "user.absent", path, sizeof path) == -1 && errno != ENOENT);

	EXPECT(readlink(CLASS "/anyverbs0", path, sizeof path) > 0 && !strncmp(path, "../../devices/", 14));
	EXPECT(realpath(CLASS "/anyverbs0/device", path) == path);
	EXPECT(!strcmp(path, "/sys/devices/virtual/anyverbs/anyverbs0"));
	EXPECT(stat(path, &st) == 0 && S_ISDIR(st.st_mode));
	allocated = realpath(path, NULL);
	EXPECT(allocated && !strcmp(allocated, path));
	free(allocated);
	allocated = canonicalize_file_name(CLASS);
	EXPECT(allocated && !strcmp(allocated, CLASS));
	free(allocated);
	EXPECT(realpath("/proc/../usr", path) && !strcmp(path, "/usr"));

	DIR *list = opendir(CLASS);
	int seen = 0;
	for (struct dirent *entry; list && (entry = readdir(list));)
		seen += !strcmp(entry->d_name, "anyverbs0");
	EXPECT(seen == 1);
	closedir(list);
	struct dirent **names;
	EXPECT(scandir("/dev/infiniband", &names, NULL, alphasort) == 5);
	glob_t found = { 0 };
	EXPECT(glob(CLASS "/*/node_type", 0, NULL, &found) == 0 && found.gl_pathc == 1 && !strcmp(found.gl_pathv[0], FILE_));
	globfree(&found);

	EXPECT(chdir(CLASS "/anyverbs0/device") == 0);
	EXPECT(getcwd(path, sizeof path) && !strcmp(path, "/sys/devices/virtual/anyverbs/anyverbs0"));
	EXPECT(holds(open("infiniband/anyverbs0/node_type", O_RDONLY)));
	EXPECT(chdir("/") == 0 && holds(open("sys/class/infiniband/anyverbs0/node_type", O_RDONLY)));

	char longest[PATH_MAX + 64] = CLASS "/";
	memset(longest + strlen(longest), 'x', PATH_MAX - 30);
	EXPECT(open(longest, O_RDONLY) == -1 && errno == ENAMETOOLONG);
	EXPECT(open(NULL, O_RDONLY) == -1 && errno == EFAULT);

	pid_t child = vfork();
	if (child == 0) {
		int fd = open(FILE_, O_RDONLY);
		_exit(fd < 0 || access(NODE, W_OK));
	}
	int status;
	EXPECT(waitpid(child, &status, 0) == child && status == 0);

	pthread_t threads[4];
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, many_opens, NULL);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);

	/* A cancelled thread unwinds through the view: opening a FIFO without a writer blocks. */
	char fifo[] = "/tmp/anyverbs-view-fifo-XXXXXX";
	EXPECT(mkdtemp(fifo) != NULL);
	strcpy(path, fifo);
	strcat(path, "/fifo");
	EXPECT(mkfifo(path, 0600) == 0);
	pthread_t blocked;
	void *result = NULL;
	pthread_create(&blocked, NULL, open_fifo, path);
	usleep(50000);
	pthread_cancel(blocked);
	pthread_join(blocked, &result);
	EXPECT(result == PTHREAD_CANCELED);
	unlink(path);
	rmdir(fifo);

	return wrong;
}
