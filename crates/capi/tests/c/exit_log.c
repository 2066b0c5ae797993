/* What is logged at exit comes out, though the thread has logged before and lost its thread-local data since. */
#include "check.h"

#include <unistd.h>

int main(int argc, char **argv)
{
	(void)argv;
	if (argc > 1) {
		TRUE(open_device() != NULL);
		exit(0);
	}
	char self[4096] = {0}, command[5000], line[4096];
	TRUE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
	snprintf(command, sizeof command, "ANYVERBS_LOG=info '%s' child 2>&1", self);
	FILE *child = popen(command, "r");
	TRUE(child != NULL);
	bool opened = false, counted = false;
	while (fgets(line, sizeof line, child) != NULL) {
		opened |= strstr(line, "is open") != NULL;
		counted |= strstr(line, "anyverbs::counters") != NULL;
	}
	OK(pclose(child));
	TRUE(opened);
	TRUE(counted);
	return 0;
}
