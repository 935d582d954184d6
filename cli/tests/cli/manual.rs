//! Shell completions and manual pages.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::process::Stdio;

use microscale_test_support::{Scratch, command, run};

/// Returns the commands that `--help` lists.
fn commands() -> Vec<String> {
    let help = run(&[&"--help"]).ok();
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let lines = commands.lines().take_while(|line| !line.is_empty());
    // Continuation lines are indented further.
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !["", "help"].contains(name)).map(String::from).collect()
}

#[test]
fn every_shell_completes_every_command() {
    let commands = commands();
    assert!(commands.len() >= 12, "{commands:?}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = run(&[&"completions", &shell]).ok();
        for word in commands.iter().map(String::as_str).chain(["scale-rule", "nvfp4"]) {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn an_unknown_shell_is_a_usage_error() {
    let refused = run(&[&"completions", &"tcsh"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(refused.stderr.contains("bash"), "the choice is named: {refused:#?}");
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut command = command(&[&"completions", &"zsh"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    assert_eq!(stderr, "");
}

#[test]
fn the_manual_has_a_page_for_every_command() {
    let scratch = Scratch::new();
    let folder = scratch.path("share/man1");
    assert_eq!(run(&[&"man", &folder]).ok(), "");
    let names: BTreeSet<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let pages = commands().into_iter().map(|name| format!("microscale-{name}.1"));
    assert_eq!(names, pages.chain(["microscale.1".into()]).collect());

    let page = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(run(&[&"man"]).ok().trim_end(), page("microscale.1").trim_end());
    assert!(page("microscale.1").contains(".TH microscale 1"));
    assert!(page("microscale.1").contains("microscale\\-quantize(1)"));
    assert!(page("microscale-quantize.1").contains("\\-\\-scale\\-rule"));
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let scratch = Scratch::new();
    let file = scratch.write("file", "");
    run(&[&"man", &file.join("man1")]).fails_with(&["cannot write manual pages", "man1"]);
}
