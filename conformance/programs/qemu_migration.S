/* The boot sector of a guest that never ends. It fills its memory from 1 MiB to FILLED with words that depend on their
 * address. Then it counts in COUNTER, and writes the count to each page from CHANGED on, so that a migration must send
 * these pages again. qemu_migration.sh builds it; qemu_migration.py knows the addresses. */
#define COUNTER 0x9000
#define PATTERN 0x5a17c3e9
#define CHANGED 0x1000000
#define CHANGED_END 0x1100000
#define FILLED 0x6000000

	.code16
	.globl _start
_start:
	cli
	xorw %ax, %ax
	movw %ax, %ds
	inb $0x92, %al /* addresses above 1 MiB */
	orb $2, %al
	outb %al, $0x92
	lgdt table
	movl %cr0, %eax
	orb $1, %al
	movl %eax, %cr0
	ljmp $8, $flat

	.code32
flat:
	movw $16, %ax
	movw %ax, %ds
	movl $0x100000, %edi
fill:
	movl %edi, %eax
	xorl $PATTERN, %eax
	movl %eax, (%edi)
	addl $4, %edi
	cmpl $FILLED, %edi
	jb fill
	xorl %eax, %eax
count:
	incl %eax
	movl %eax, COUNTER
	movl $CHANGED, %edi
change:
	movl %eax, (%edi)
	addl $4096, %edi
	cmpl $CHANGED_END, %edi
	jb change
	jmp count

	.balign 8
segments: /* none, code, data: each is all of the memory */
	.quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff
table:
	.word table - segments - 1
	.long segments

	.org 510
	.word 0xaa55
