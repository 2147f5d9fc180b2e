//! Tests of the command line, and its recorded help.

use clap::CommandFactory;

use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_of_the_manual_is_understood() {
    for line in [
        "godwit host run --config /etc/godwit/host.toml",
        "godwit host watchdog --config /etc/godwit/host.toml",
        "godwit host show",
        "godwit host list --json",
        "godwit vm create web --memory 1GiB --memory 512MiB --vcpus 2 --cpu Nehalem --machine q35 \
         --accel tcg --kernel /k --initrd /i --append console=ttyS0 --disk path=/d,format=raw \
         --nic network=lan --qemu /q --private-memory --device virtio-rng-pci --start",
        "godwit vm create -f web.toml --start --host a",
        "godwit vm stop web --grace 10s",
        "godwit vm logs web -f --qemu",
        "godwit migrate web --to b --engine qemu --multifd-channels 4 --multifd-compression zstd \
         --auto-converge --postcopy",
        "godwit migrate web --to b --switchover-budget 500us --detach",
        "godwit migrate web --to b --policy deadline=90s --dry-run --json",
        "godwit probe b",
        "godwit probe b --from a --size 64GiB --seconds 2.5 --json",
        "godwit migrate web --to b --bandwidth-limit 2gbit",
        "godwit migration limit m1 500mbit",
        "godwit migration limit m1 none --json",
        "godwit host limit",
        "godwit host limit 1gbit --lane fd77::11 --host a",
        "godwit host limit none --each-migration",
        "godwit migrate web --to b --compression lz4",
        "godwit migrate web --to b --references own",
        "godwit migrate web --to b --with-disks --disks-to /ssd --delete-source-disks",
        "godwit migrate web --to b --with-disks --keep-source-disks",
        "godwit disk kept --host a --json",
        "godwit disk kept remove /srv/web.qcow2 --host a",
        "godwit disk kept keep /srv/web.qcow2 --manager https://m1:7800 --host a",
        "godwit control move create web --with-disks --flatten-disks --detach",
        "godwit migrate web --to b --with-disks --disks-to /dev/vg0 --overwrite-devices",
        "godwit vm preflight web --to b --with-disks --disks-to /dev/vg0 --overwrite-devices",
        "godwit host drain a --with-disks --plan",
        "godwit migration cancel m1",
        "godwit control rule create db-apart apart --vm db1,db2 --should",
        "godwit control rule create gpu on --vm t1 --vm t2 --at a --at-label gpu=yes --json",
        "godwit control rule create quiet not-on --vm t1 --at a,b",
        "godwit control rule list --json",
        "godwit control cpu-baseline show --vms --json",
        "godwit control cpu-baseline set computed --plan",
        "godwit control cpu-baseline set Haswell-v4,-hle --without a,b --without c",
        "godwit control cpu-baseline clear --json",
        "godwit control ha show --json",
        "godwit control ha set --enabled on --failures 2 --admission refuse",
        "godwit control ha confirm-off a --term 3",
        "godwit control ha fencing test --json",
        "godwit host ha a --json",
        "godwit host ha confirm-off b manager --term 3 --json",
        "godwit vm create manager --kernel /k --protect-by-agents",
        "godwit vm create web --kernel /k --protect low",
        "godwit control rule show gpu",
        "godwit control rule delete gpu",
        "godwit datastore list --tag ssd --host a --json",
        "godwit datastore set /srv --name fast --tag ssd --tag fast",
        "godwit datastore maintenance fast on --manager https://m1:7800",
        "godwit datastore drain fast --dry-run --to slow --flatten",
        "godwit job list --host a --json",
        "godwit job cancel 5b1c2a60-7d0f-4d2e-9f0e-2f5f4f7f0001 --manager https://m1:7800",
        "godwit watch 10.88.0.21 --min-gap 5ms --for 1min",
        "godwit top --by network --limit 5 --once --json --manager https://m1:7800",
        "godwit control load vm:web --since 90min --resolution 1min",
        "godwit completions zsh",
    ] {
        if let Err(error) = parse(line) {
            panic!("{line}: {error}");
        }
    }
}

#[test]
fn invalid_command_lines_are_refused() {
    for line in [
        "godwit vm create",
        "godwit vm create -f web.toml --memory 1G",
        "godwit vm create web --memory 1GB",
        "godwit migrate web",
        "godwit migrate web --to b --switchover-budget 20",
        "godwit migrate web --to b --dry-run --detach",
        "godwit migrate web --to b --bandwidth-limit 0",
        "godwit migration limit m1",
        "godwit migration limit m1 500kbit",
        "godwit host limit fast",
        "godwit host limit --lane 10.0.0.1",
        "godwit host limit 1gbit --lane 10.0.0.1 --each-migration",
        "godwit migrate web --to b --compression zlib",
        "godwit migrate web --to b --references some",
        "godwit migrate web --to b --disks-to /ssd",
        "godwit control move create web --delete-source-disks",
        "godwit migrate web --to b --with-disks --keep-source-disks --delete-source-disks",
        "godwit disk kept forget /srv/web.qcow2",
        "godwit migrate web --to b --overwrite-devices",
        "godwit migrate web --to b --engine qemu --multifd-compression zstd",
        "godwit watch web",
        "godwit control rule create r apart",
        "godwit control cpu-baseline set",
        "godwit control ha set",
        "godwit control ha set --failures 9",
        "godwit control ha set --admission maybe",
        "godwit control ha confirm-off a",
        "godwit control ha confirm-off a --term 0",
        "godwit vm set web --protect first",
        "godwit vm set web --protect low --protect-by-agents",
        "godwit host ha confirm-off b manager",
        "godwit host ha confirm-off b --term 3",
        "godwit host ha a confirm-off b manager --term 3",
        "godwit control rule create r near --vm x,y",
        "godwit control rule create r on --vm x --at-label rack",
        "godwit probe",
        "godwit probe b --size 16GB",
        "godwit probe b --seconds 1s",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn the_hosts_file_may_stand_on_either_side() {
    for line in [
        "godwit --hosts /h vm list",
        "godwit vm --hosts /h list",
        "godwit vm list --hosts /h",
        "godwit migrate web --to b --hosts /h",
        "godwit probe b --hosts /h",
        "godwit migration list --hosts /h",
    ] {
        assert_eq!(parse(line).unwrap().hosts_file(), Some("/h".into()), "{line}");
    }
}

/// Prose is wrapped at the terminal's width. A footer with its own line breaks would be wrapped
/// twice.
#[test]
fn footers_have_an_example_and_leave_wrapping_to_the_terminal() {
    const COLUMNS: usize = 110;
    let mut waiting = vec![Cli::command()];
    while let Some(command) = waiting.pop() {
        let footer = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let lines: Vec<&str> = footer.lines().collect();
        for pair in lines.windows(2).filter(|pair| pair.iter().all(|line| !line.is_empty())) {
            assert!(
                pair[1].starts_with("  "),
                "{}: {pair:?} are one paragraph",
                command.get_name()
            );
        }
        assert!(
            lines.iter().filter(|line| line.starts_with("  ")).all(|line| line.len() <= COLUMNS),
            "{footer}"
        );
        waiting.extend(command.get_subcommands().cloned());
    }
}

/// Returns every command without subcommands, as typed, with its footer.
fn leaves() -> Vec<(String, String)> {
    let mut root = Cli::command();
    // Gives each command its full name.
    root.build();
    let mut waiting = vec![root];
    let mut leaves = Vec::new();
    while let Some(command) = waiting.pop() {
        let below =
            command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set());
        let below: Vec<_> = below.cloned().collect();
        if below.is_empty() {
            let footer = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            leaves.push((command.get_bin_name().unwrap_or_default().to_owned(), footer));
        }
        waiting.extend(below);
    }
    leaves
}

/// Returns the example lines of a footer, split as a shell does, up to the first redirection or
/// pipe.
fn examples(footer: &str) -> Vec<Vec<String>> {
    let whole = footer.replace("\\\n", " ");
    let typed = whole
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| line.starts_with("godwit "));
    let words = |line: &str| -> Vec<String> {
        let mut words = vec![String::new()];
        for (place, part) in line.split('\'').enumerate() {
            // Every second part is inside quotes.
            if place % 2 == 1 {
                words.last_mut().unwrap().push_str(part);
                continue;
            }
            for (place, piece) in part.split(' ').enumerate() {
                if place > 0 {
                    words.push(String::new());
                }
                words.last_mut().unwrap().push_str(piece);
            }
        }
        words.retain(|word| !word.is_empty());
        words.into_iter().take_while(|word| !word.starts_with('>') && word != "|").collect()
    };
    typed.map(words).collect()
}

#[test]
fn each_command_has_an_example_of_itself() {
    for (name, footer) in leaves() {
        let examples = examples(&footer);
        let command: Vec<&str> = name.split(' ').skip(1).collect();
        // Options with their values may be between the words of a command.
        let is_of_it = |line: &Vec<String>| {
            let mut words = line.iter().map(String::as_str);
            command.iter().all(|word| words.any(|typed| typed == *word))
        };
        assert!(!examples.is_empty(), "{name} --help has no example");
        assert!(
            examples.iter().any(is_of_it),
            "{name} --help has no example of itself: {examples:?}"
        );
    }
}

#[test]
fn each_example_is_understood() {
    let mut waiting = vec![Cli::command()];
    let mut understood = 0;
    while let Some(command) = waiting.pop() {
        let footer = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        for line in examples(&footer) {
            match Cli::try_parse_from(&line) {
                Ok(cli) => assert!(cli.refused_host().is_none(), "{line:?}"),
                Err(error) => panic!("{line:?} of {} --help: {error}", command.get_name()),
            }
            understood += 1;
        }
        waiting.extend(command.get_subcommands().cloned());
    }
    assert!(understood > 100, "{understood}");
}

#[test]
fn a_host_is_refused_where_none_is_asked() {
    for line in [
        "godwit control host list --host a",
        "godwit control --host a status",
        "godwit --host a control status",
        "godwit host drain a --host b",
        "godwit host --host b drain a",
        "godwit host drains --host a",
        "godwit vm preflight web --host a",
        "godwit vm --host a preflight web",
        "godwit --host a pki show ca.pem",
        "godwit watch 10.88.0.21 --host a",
        "godwit top --host a",
    ] {
        let message = match parse(line) {
            Ok(cli) => cli.refused_host().map(|failure| failure.to_string()).unwrap_or_default(),
            Err(error) => error.to_string(),
        };
        assert!(message.contains("sends no request to a host"), "{line}: {message}");
    }
    for line in
        ["godwit vm list --host a", "godwit --host a host limit", "godwit migration list --host a"]
    {
        let cli = parse(line).unwrap();
        assert!(cli.host.as_deref() == Some("a") && cli.refused_host().is_none(), "{line}");
    }
    for (name, _) in leaves() {
        let takes_none = name.starts_with("godwit control") || name == "godwit host drain";
        let mut command = Cli::command();
        command.build();
        let mut words = name.split(' ').skip(1);
        let found = words.try_fold(&command, |of, word| of.find_subcommand(word)).unwrap();
        let help = found.clone().render_long_help().to_string();
        assert!(!takes_none || !help.contains("--host <NAME>"), "{name}: {help}");
    }
}

/// The whole help as one text, so that changes of the interface are visible in reviews.
#[test]
fn the_help_is_as_recorded() {
    let mut root = Cli::command().term_width(100);
    // Gives each command its full name.
    root.build();
    let mut text = String::new();
    let mut waiting = vec![root];
    while let Some(mut command) = waiting.pop() {
        text.push_str(&format!("{}\n\n", command.render_long_help()));
        let subs = command.get_subcommands().filter(|sub| sub.get_name() != "help");
        waiting.extend(subs.map(|sub| sub.clone().term_width(100)));
    }
    let recorded = include_str!("../../tests/help.txt");
    if std::env::var_os("GODWIT_RECORD").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/help.txt"), &text).unwrap();
        return;
    }
    assert!(
        text == recorded,
        "the help has changed: record it with GODWIT_RECORD=1 cargo test -p godwit-cli"
    );
}
